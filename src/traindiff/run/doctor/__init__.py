"""`traindiff doctor`: check that recording works on this machine."""
