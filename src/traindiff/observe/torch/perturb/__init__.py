"""Perturb a training within rounding, on purpose and reproducibly: what that changes is noise."""
