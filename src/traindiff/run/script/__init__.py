"""`traindiff run`: record a training script as it is."""
