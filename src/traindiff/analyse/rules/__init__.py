"""Rules that a run must keep by itself, without a baseline. Needs no framework."""

from traindiff.analyse.rules.batches import BatchesChange, SamplesDiffer, SamplesVary
from traindiff.analyse.rules.broadcast_losses import LossesPairSamples
from traindiff.analyse.rules.carried import GradientsAreCleared
from traindiff.analyse.rules.contributions import ContributionsCount, ElementsAddUp
from traindiff.analyse.rules.counting import OptimizersKeepParameters, StepsAreCounted
from traindiff.analyse.rules.edits import OptimizersAloneChangeParameters
from traindiff.analyse.rules.evaluation import EvaluationDrawsNothing, SpectralNormsAreEstimated
from traindiff.analyse.rules.flips import TensorsKeepTheirBits
from traindiff.analyse.rules.inputs import InputsHaveAllSamples, InputsHaveEquallyMany, SamplesArrive
from traindiff.analyse.rules.interrupted import ForwardPassesEnd
from traindiff.analyse.rules.layers import EvaluationIsCertain, UnitsAreSensitive, UnitsLive
from traindiff.analyse.rules.losses import LossDecreases, LossDoesNotDiverge, NothingSpikes
from traindiff.analyse.rules.lost_updates import UpdatesSurviveRounding
from traindiff.analyse.rules.lost_weights import StepsKeepWeights
from traindiff.analyse.rules.masters import MastersAreCopied
from traindiff.analyse.rules.modes import ModelTrainsInTrainingMode
from traindiff.analyse.rules.optimizers import EpsIsSmall, LearningRateIsSet, ScheduleIsFollowed, SecondMomentsHold
from traindiff.analyse.rules.outputs import OutputsDiffer
from traindiff.analyse.rules.products import ProductsAreExact, ProductsAreRight
from traindiff.analyse.rules.ranges import FarFromOverflow, FarFromUnderflow, FiniteThroughout, LossScaleSettles
from traindiff.analyse.rules.rank_steps import RanksStepTogether
from traindiff.analyse.rules.ranks import BoundariesHold, CopiesAgree
from traindiff.analyse.rules.recomputation import RecomputationRepeats
from traindiff.analyse.rules.replay import UpdatesFollowSettings
from traindiff.analyse.rules.reported import ReportedNumbersFit
from traindiff.analyse.rules.rule import Limit, Rule, RunFacts, run_facts
from traindiff.analyse.rules.settings import FrozenStagesRest, SiblingsShareDtype
from traindiff.analyse.rules.stopping import ParametersKeepMoving
from traindiff.analyse.rules.tying import TiedGradientsAddUp, TyingStays
from traindiff.analyse.rules.unused_parameters import GradientsArrive, OptimizersHaveGradients, ParametersMove
from traindiff.analyse.rules.weights import (
    GradientsReachEveryLayer,
    GradientsStayBounded,
    UpdatesAreLargeEnough,
    UpdatesAreSmall,
)
from traindiff.analyse.rules.witness import GradientsFollow

RULES: tuple[type[Rule], ...] = (
    FiniteThroughout,
    ProductsAreRight,
    RanksStepTogether,
    CopiesAgree,
    RecomputationRepeats,
    OptimizersAloneChangeParameters,
    BoundariesHold,
    GradientsAreCleared,
    TensorsKeepTheirBits,
    GradientsFollow,
    UpdatesFollowSettings,
    UpdatesSurviveRounding,
    MastersAreCopied,
    ReportedNumbersFit,
    TiedGradientsAddUp,
    ParametersMove,
    ParametersKeepMoving,
    StepsAreCounted,
    FrozenStagesRest,
    GradientsReachEveryLayer,
    GradientsStayBounded,
    UpdatesAreSmall,
    StepsKeepWeights,
    UnitsLive,
    LossDoesNotDiverge,
    LossScaleSettles,
    SecondMomentsHold,
    LearningRateIsSet,
    OptimizersHaveGradients,
    GradientsArrive,
    OptimizersKeepParameters,
    UpdatesAreLargeEnough,
    UnitsAreSensitive,
    OutputsDiffer,
    NothingSpikes,
    LossDecreases,
    LossesPairSamples,
    EpsIsSmall,
    FarFromOverflow,
    FarFromUnderflow,
    ProductsAreExact,
    ContributionsCount,
    ElementsAddUp,
    BatchesChange,
    SamplesDiffer,
    SamplesVary,
    SamplesArrive,
    InputsHaveAllSamples,
    InputsHaveEquallyMany,
    SiblingsShareDtype,
    ModelTrainsInTrainingMode,
    EvaluationIsCertain,
    EvaluationDrawsNothing,
    SpectralNormsAreEstimated,
    ScheduleIsFollowed,
    TyingStays,
    ForwardPassesEnd,
)
"""All rules: `traindiff check` asks each of them, `traindiff compare` those that tell runs apart."""

__all__ = ["RULES", "Limit", "Rule", "RunFacts", "run_facts"]
