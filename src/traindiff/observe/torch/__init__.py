"""Observe PyTorch trainings: `hooks` see tensors, `session` puts them together around a training.

`sharding` knows which part of a tensor a rank holds, `perturb` makes replicas, and `nonfinite` follows NaN and infinity
to where they begin.
"""
