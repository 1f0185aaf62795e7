"""A small real training, healthy or with a known fault, to see traindiff at work on."""
