"""The vocabulary that every layer shares: what is observed, where, when, and its summary."""
