"""Two recordings to a verdict: align, measure, judge, describe. Needs no framework."""

from traindiff.analyse.align.pairs import Unaligned
from traindiff.analyse.compare.comparing import compare
from traindiff.analyse.compare.verdict import Comparison, SiteDifference
from traindiff.analyse.compare.verification import Pinned, RunCost, Verification
from traindiff.analyse.findings import Finding

__all__ = ["Comparison", "Finding", "Pinned", "RunCost", "SiteDifference", "Unaligned", "Verification", "compare"]
