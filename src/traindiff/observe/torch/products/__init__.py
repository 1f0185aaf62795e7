"""Checks matrix products and convolutions from their own inputs and outputs, by random vectors (Freivalds 1977)."""
