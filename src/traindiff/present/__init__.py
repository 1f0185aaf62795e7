"""Results as people and other programs read them. Needs no framework."""
