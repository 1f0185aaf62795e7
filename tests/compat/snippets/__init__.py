"""The snippets that other tools document, in words of our own, with only their import changed."""
