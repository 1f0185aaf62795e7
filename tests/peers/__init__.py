"""Faults that other tools find, and what traindiff says of them."""
