"""Directions of gradients in two runs: the share of elements whose signs agree, by parameter and step."""

from traindiff.directions.agreement import Agreement
from traindiff.directions.comparing import compare_directions
from traindiff.directions.similarities import BrokenRule, Similarities

__all__ = ["Agreement", "BrokenRule", "Similarities", "compare_directions"]
