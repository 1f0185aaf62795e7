"""One recording to a verdict: what is wrong with a run, without another one to hold it against. Needs no framework."""

from traindiff.health.checking import check
from traindiff.health.verdict import Verdict

__all__ = ["Verdict", "check"]
