"""What a run must keep by itself, without another one to hold it against. Needs no framework."""

from traindiff.rules.agreement import CopiesAgree
from traindiff.rules.boundaries import BoundariesHold
from traindiff.rules.never_updated import ParametersMove
from traindiff.rules.replay import UpdatesFollowSettings
from traindiff.rules.reported import ReportedNumbersFit
from traindiff.rules.rule import Rule, RunFacts, run_facts
from traindiff.rules.tied import TiedGradientsAddUp

RULES: tuple[type[Rule], ...] = (
    CopiesAgree,
    BoundariesHold,
    UpdatesFollowSettings,
    ReportedNumbersFit,
    TiedGradientsAddUp,
    ParametersMove,
)
"""All rules: `traindiff check` asks each of them, `traindiff compare` those that tell runs apart."""

__all__ = ["RULES", "Rule", "RunFacts", "run_facts"]
