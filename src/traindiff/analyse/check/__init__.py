"""One recording to a verdict: what is wrong with a run, without a baseline. Needs no framework."""

from traindiff.analyse.check.checking import Verdict, check
from traindiff.analyse.rules import RULES, Rule

__all__ = ["RULES", "Rule", "Verdict", "check"]
