"""Two recordings to a verdict: align, measure, judge, say what it looks like. Needs no framework."""

from traindiff.comparison.comparing import compare
from traindiff.comparison.verdict import Comparison, Finding, SiteDifference, Unaligned
from traindiff.comparison.verification import Pinned, RunCost, Verification

__all__ = ["Comparison", "Finding", "Pinned", "RunCost", "SiteDifference", "Unaligned", "Verification", "compare"]
