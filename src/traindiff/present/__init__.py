"""Verdicts and recordings as people and other programs read them. Needs no framework."""
