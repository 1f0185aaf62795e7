"""Files about two models: which tensors are which, and which differences are intended (traindiff explain maps)."""
