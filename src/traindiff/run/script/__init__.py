"""`traindiff run`: run a training script unchanged, and record it."""
