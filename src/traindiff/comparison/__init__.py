"""Two recordings to a verdict: align, measure, judge, say what it looks like. Needs no framework."""

from traindiff.alignment.presence import Unaligned
from traindiff.comparison.comparing import compare
from traindiff.comparison.verdict import Comparison, SiteDifference
from traindiff.comparison.verification import Pinned, RunCost, Verification
from traindiff.findings import Finding

__all__ = ["Comparison", "Finding", "Pinned", "RunCost", "SiteDifference", "Unaligned", "Verification", "compare"]
