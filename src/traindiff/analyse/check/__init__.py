"""One recording to a verdict: what is wrong with a run, without another one to hold it against. Needs no framework."""

from traindiff.analyse.check.checking import check
from traindiff.analyse.check.verdict import Verdict
from traindiff.analyse.rules import RULES, Rule

__all__ = ["RULES", "Rule", "Verdict", "check"]
