"""A small real training, healthy or with a known fault, for demonstrations and tests."""
