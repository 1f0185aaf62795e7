"""`traindiff demo`."""
