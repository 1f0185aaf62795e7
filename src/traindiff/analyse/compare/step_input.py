"""Facts about one step of both runs, from which it is judged."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from traindiff.analyse.align.returned_states import Sources
from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.distance import Pair
from traindiff.analyse.merge.recorded_calls import Samples
from traindiff.analyse.merge.site import MergedSite
from traindiff.analyse.noise.measured import Calibration, StepNoise


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """Facts about a step before it is judged.

    Attributes:
        step: Its number.
        optimizer: Name of the optimizer whose step it is.
        first: As in `AlignedStep`.
        steps_before: Number of steps of both runs before a first one, which were not compared; 0 in all others.
        drift: Relative difference of all parameters together that these may have left; infinite if it is too large.
        searches: Whether the optimizer evaluates the loss several times, and both runs have replayed what it did.
        alignments: Size of the largest loss that sums over alignments; see `core.observation.ALIGNMENTS`.
        pairs: Aligned sites in the baseline's execution order.
        found: Findings of the step that need no measuring.
        contributions: By path: gradients of the candidate's micro-batches.
        expected: The same of the baseline.
        parameters: By path: the parameters as this step found them, on both sides.
        parameters_known: False if these may be of different moments: then nothing is said of how far they are apart.
        micro_steps: Micro-batches in the candidate's step.
        most_micro_steps: The same of the run that has more of them.
        ranks: Number of ranks that share the batch, in the run that has more of them.
        samples: Elements in the baseline's batch.
        batches: The single samples of both runs' batches.
        noise: Differences of replicas in this step; None without them.
        calibration: The calibration; empty without replicas.
        factors: Known factors, with what to say about each.
        clipped: The same for gradients only.
        coefficients: Factors that clipping to a norm applied in both runs; 1 without it.
        clip: The weakest of the factors that the baseline's calls applied one by one; 1 without any.
        clips: Whether a run clips gradients in this step.
        clips_in_one: Whether only one run is seen to do so.
        carried: Part that a gradient which was not set to zero has in the next one, relative to that one's own part.
        leaky: Whether the model has gates that leave no zeros when they shut.
        evaluation: Number of the evaluation of the loss; None in a step with one.
        whole: True if the pairs include those of the whole step: updates, and the optimizer's state.
        classes: Class names of norms, other than LayerNorm, and of embeddings, by path.
        holders: Paths of modules that hold parameters and are never called.
        unplaced: The baseline's entries of sites whose rows could not be brought together, in execution order.
        unpaired: Entries of sites that only one run has, the baseline's first.
        hidden: Stretches of activations that one run alone has observed, in the baseline's execution order.
        computed_in: The shortest dtype to which autocast converts in one of the runs; empty without autocast.
        other_form: Whether both runs were given the same samples, padded or ordered otherwise.
        calls: By module that the runs call on other parts of the batch: its calls in the run that calls it more often.
        sources: Inputs of each run that are its own outputs, as `ReturnedStates.sources`.
        every_bit: Why any bit that differs is a finding; empty if floors decide.
    """

    step: int
    optimizer: str
    first: bool
    pairs: tuple[Pair, ...]
    found: tuple[Finding, ...]
    contributions: Mapping[str, Mapping[tuple[int, int], Any]]
    expected: Mapping[str, Mapping[tuple[int, int], Any]]
    parameters: Mapping[str, Pair]
    micro_steps: int
    most_micro_steps: int
    ranks: int
    samples: int
    batches: tuple[Samples, Samples] = ({}, {})
    noise: StepNoise | None = None
    calibration: Calibration = field(default_factory=Calibration)
    factors: tuple[tuple[float, str], ...] = ()
    clipped: tuple[tuple[float, str], ...] = ()
    coefficients: tuple[float, float] = (1.0, 1.0)
    clip: float = 1.0
    clips: bool = False
    clips_in_one: bool = False
    steps_before: int = 0
    drift: float = math.inf
    alignments: float = 0.0
    searches: bool = False
    carried: float = 1.0
    leaky: bool = False
    evaluation: int | None = None
    whole: bool = True
    parameters_known: bool = True
    classes: Mapping[str, str] = field(default_factory=dict)
    holders: Collection[str] = ()
    unplaced: tuple[MergedSite, ...] = ()
    unpaired: tuple[MergedSite, ...] = ()
    hidden: tuple[MergedSite, ...] = ()
    computed_in: str = ""
    other_form: bool = False
    calls: Mapping[str, int] = field(default_factory=dict)
    sources: Sources = ({}, {})
    every_bit: str = ""
