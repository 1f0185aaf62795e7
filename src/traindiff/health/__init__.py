"""One recording to a verdict: what is wrong with a run, without another one to hold it against. Needs no framework."""

from traindiff.health.checking import check
from traindiff.health.verdict import Verdict
from traindiff.rules import RULES, Rule

__all__ = ["RULES", "Rule", "Verdict", "check"]
