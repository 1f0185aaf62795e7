"""Signs of gradients in two runs: the share of elements that agree, by parameter and step."""

from traindiff.analyse.signs.similarities import Agreement, BrokenRule, Similarities, compare_directions

__all__ = ["Agreement", "BrokenRule", "Similarities", "compare_directions"]
