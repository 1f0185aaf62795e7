"""Directions of gradients in two runs: the share of elements whose signs agree, by parameter and step."""

from traindiff.analyse.signs.comparing import compare_directions
from traindiff.analyse.signs.similarities import Agreement, BrokenRule, Similarities

__all__ = ["Agreement", "BrokenRule", "Similarities", "compare_directions"]
