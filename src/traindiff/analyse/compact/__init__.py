"""Compact recordings: the ranks of a step merged once, and what is kept of each rank."""

from traindiff.analyse.compact.compacting import Compacted, compact
from traindiff.analyse.compact.pruning import prune

__all__ = ["Compacted", "compact", "prune"]
