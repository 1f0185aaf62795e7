"""What a run must keep by itself, without another one to hold it against. Needs no framework."""

from traindiff.rules.agreement import CopiesAgree
from traindiff.rules.boundaries import BoundariesHold
from traindiff.rules.constant_batch import SamplesVary
from traindiff.rules.dead_units import UnitsLive
from traindiff.rules.diverging_loss import LossDoesNotDiverge
from traindiff.rules.dropout_in_evaluation import EvaluationIsCertain
from traindiff.rules.duplicate_samples import SamplesDiffer
from traindiff.rules.eps_dominates import EpsIsSmall
from traindiff.rules.exploding_gradients import GradientsStayBounded
from traindiff.rules.idle_optimizer import OptimizersHaveGradients
from traindiff.rules.large_updates import UpdatesAreSmall
from traindiff.rules.near_overflow import FarFromOverflow
from traindiff.rules.never_updated import ParametersMove
from traindiff.rules.no_gradient import GradientsArrive
from traindiff.rules.non_finite import FiniteThroughout
from traindiff.rules.repeated_batch import BatchesChange
from traindiff.rules.replay import UpdatesFollowSettings
from traindiff.rules.reported import ReportedNumbersFit
from traindiff.rules.rule import Limit, Rule, RunFacts, run_facts
from traindiff.rules.saturated_units import UnitsAreSensitive
from traindiff.rules.skipped_steps import LossScaleSettles
from traindiff.rules.small_updates import UpdatesAreLargeEnough
from traindiff.rules.spike import NothingSpikes
from traindiff.rules.stalled_loss import LossDecreases
from traindiff.rules.tied import TiedGradientsAddUp
from traindiff.rules.tying_changed import TyingStays
from traindiff.rules.unchanged_learning_rate import ScheduleIsFollowed
from traindiff.rules.underflow import FarFromUnderflow
from traindiff.rules.vanishing_gradients import GradientsReachEveryLayer
from traindiff.rules.zero_learning_rate import LearningRateIsSet
from traindiff.rules.zero_second_moment import SecondMomentsHold

RULES: tuple[type[Rule], ...] = (
    FiniteThroughout,
    CopiesAgree,
    BoundariesHold,
    UpdatesFollowSettings,
    ReportedNumbersFit,
    TiedGradientsAddUp,
    ParametersMove,
    GradientsReachEveryLayer,
    GradientsStayBounded,
    UpdatesAreSmall,
    UnitsLive,
    LossDoesNotDiverge,
    LossScaleSettles,
    SecondMomentsHold,
    LearningRateIsSet,
    OptimizersHaveGradients,
    GradientsArrive,
    UpdatesAreLargeEnough,
    UnitsAreSensitive,
    NothingSpikes,
    LossDecreases,
    EpsIsSmall,
    FarFromOverflow,
    FarFromUnderflow,
    BatchesChange,
    SamplesDiffer,
    SamplesVary,
    EvaluationIsCertain,
    ScheduleIsFollowed,
    TyingStays,
)
"""All rules: `traindiff check` asks each of them, `traindiff compare` those that tell runs apart."""

__all__ = ["RULES", "Limit", "Rule", "RunFacts", "run_facts"]
