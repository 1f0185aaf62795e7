"""The floor of each site of a step: measured by replicas where there are some, else from rounding."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from traindiff.comparison.alignment import Pair
from traindiff.comparison.floors import UNIT_ROUNDOFF, Floors
from traindiff.comparison.gradients import Terms, gradient_floor, terms_by_module
from traindiff.comparison.measure import difference, equal_bits
from traindiff.comparison.noise import FEW, SAFETY, Calibration, StepNoise, basis
from traindiff.summary import distance, finite_count, norm

LINEAR_STATE = frozenset({"momentum_buffer", "step"})
"""State slots of optimizers whose update is linear in the gradient."""


@dataclass(slots=True)
class RunFloors:
    """What the floors of later steps need to know of earlier ones.

    Attributes:
        gradients: Largest relative difference of each parameter's gradients so far in the run.
        adaptive: Parameters whose optimizer keeps a moment that it divides by.
        settings_differ: Whether the optimizers are set differently.
        parted: Whether anything has exceeded its measured floor: then inputs no longer agree within
            noise, and what follows from that is no further divergence.
    """

    gradients: dict[str, float] = field(default_factory=dict)
    adaptive: set[str] = field(default_factory=set)
    settings_differ: bool = False
    parted: bool = False


class SiteFloors:
    """Floors of one step, in the order of execution.

    Without replicas a site is judged by rounding and by the differences measured at its inputs. With
    replicas it is judged by what they differ by at the very site; rounding and inputs count only
    where replicas cannot tell (scalars, updates, sites that no replica has), and, once the runs have
    parted, for what follows from that.

    Args:
        run: Carried from step to step.
        parameters: By path: the parameters as the step found them, on both sides.
        pairs: All pairs of the step.
        samples: Elements in the batch.
        noise: What replicas differ by in this step; None without them.
        calibration: Constants of the measured floors.
    """

    def __init__(
        self,
        run: RunFloors,
        *,
        parameters: Mapping[str, Pair],
        pairs: Iterable[Pair],
        samples: int,
        noise: StepNoise | None,
        calibration: Calibration,
    ) -> None:
        self._run = run
        self._parameters = parameters
        self._samples = samples
        self._noise = noise
        self._calibration = calibration
        self._terms: Mapping[str, Terms] = terms_by_module(pairs)
        self._floors = _at_the_beginning(parameters, run)

    @property
    def inputs_differ(self) -> bool:
        """Whether anything that this step has read so far differs at all."""
        return bool(self._floors.flow or self._floors.parameters)

    def of(self, pair: Pair) -> float:
        """Floor of a pair: the largest relative difference that is no finding."""
        if pair.baseline.key.slot == "step" and pair.baseline.key.phase == "optimizer":
            return 0.0
        measured = self.measured(pair)
        derived = self._derived(pair)  # also notes what later floors need
        if measured is None:
            return derived
        if self._run.parted or self._is_unmeasurable(pair):
            return max(measured, derived)
        return max(measured, self._gated(pair))

    def measured(self, pair: Pair) -> float | None:
        """The measured part of the floor; None where no replica has the site."""
        key = pair.baseline.key
        if self._noise is None or key not in self._noise:
            return None
        constant = SAFETY * self._calibration.constant(key.phase)
        return constant * basis(pair, self._noise[key], storage=self.storage(pair))

    def saw(self, pair: Pair, size: float) -> None:
        """A difference was measured. Later floors of the step follow from it, or from what replicas show there."""
        key, floors = pair.baseline.key, self._floors
        expected = None if self._noise is None else self._noise.get(key)
        if expected is not None:
            measured = self.measured(pair) or 0.0
            few = int(finite_count(pair.baseline.summary)) < FEW and key.phase not in ("update", "param")
            self._run.parted |= size > measured and not few
            size = size if size > measured else max(expected)
        if key.phase == "optimizer":
            floors.saw_state(key.path, size)
        elif key.phase == "grad" and key.slot == "grad":
            floors.saw_gradient(key.path, size)
        if key.phase in ("forward", "backward", "loss") or (key.phase == "grad" and not key.stage):
            floors.saw(size)

    def saw_other_inputs(self, size: float) -> None:
        """The batch or the random state differs, by so much."""
        self._floors.saw(size)

    def factor(self, pair: Pair, *, left_over: float) -> float:
        """Floor of a difference that is a constant factor and nothing else; see `Floors.factor`."""
        dtypes = (pair.baseline.dtype, pair.candidate.dtype)
        derived = self._floors.factor(pair.baseline.key.path, dtypes, left_over=left_over, storage=self.storage(pair))
        return max(derived, self.measured(pair) or 0.0)

    def storage(self, pair: Pair) -> float:
        """Norm of a parameter over norm of its update; 0 for anything but updates.

        Where the baseline lost all of its update to rounding, the candidate's may be as large as
        what rounding loses: the answer is then inf, as for every update of nothing.
        """
        key = pair.baseline.key
        before, size = self._parameters.get(key.path), float(norm(pair.baseline.summary))
        if before is None or key.phase != "update":
            return 0.0
        whole, u = float(norm(before.baseline.summary)), UNIT_ROUNDOFF.get(pair.baseline.dtype, 0.0)
        if size:
            return whole / size
        return math.inf if float(norm(pair.candidate.summary)) <= 2.0 * u * whole else 0.0

    def parameter(self, pair: Pair, update_floor: float) -> float | None:
        """Floor of a parameter after the step: no further apart than before it, plus what its update may bring."""
        before = self._parameters.get(pair.baseline.key.path)
        measured = self.measured(pair)
        if measured is not None and not (self._run.parted or self._is_unmeasurable(pair)):
            return measured
        if before is None:
            return None
        whole = float(norm(pair.baseline.summary)) or 1.0
        moved = float(distance(before.baseline.summary, pair.baseline.summary)) / whole
        u = UNIT_ROUNDOFF.get(pair.baseline.dtype, 0.0)
        floor = 2.0 * (difference(before) or 0.0) + 2.0 * moved * update_floor + 4.0 * u
        return max(measured or 0.0, floor) if not math.isnan(floor) else math.inf

    def _is_unmeasurable(self, pair: Pair) -> bool:
        """Whether a few replicas cannot tell how far correct runs may be.

        Of a number or a handful of them, the distances of replicas are a few draws of chance. The first
        updates of adaptive optimizers are signs, which rarely flip, and by their whole size if they do.
        """
        key = pair.baseline.key
        few = int(finite_count(pair.baseline.summary)) < FEW
        return few or (key.phase in ("update", "param") and key.path in self._run.adaptive)

    def _derived(self, pair: Pair) -> float:
        key, floors = pair.baseline.key, self._floors
        dtypes = (pair.baseline.dtype, pair.candidate.dtype)
        if key.phase in ("forward", "backward"):
            return max(floors.activation(key.path, dtypes), self._gated(pair))
        if key.phase == "loss" or key.slot == "norm":
            return floors.scalar(self._samples)
        if key.phase == "grad":
            return gradient_floor(pair, self._terms, floors)
        if key.phase == "optimizer":
            if key.slot not in LINEAR_STATE:
                self._run.adaptive.add(key.path)
            return floors.state(key.path, dtypes)
        if key.phase == "update":
            adaptive = key.path in self._run.adaptive
            return floors.update(key.path, dtypes[0], adaptive=adaptive, storage=self.storage(pair))
        return floors.activation(key.path.rpartition(".")[0], dtypes)  # a buffer

    def _gated(self, pair: Pair) -> float:
        if pair.baseline.key.phase != "backward":
            return 0.0
        return self._floors.gated(pair.baseline.summary, pair.candidate.summary)


def _at_the_beginning(parameters: Mapping[str, Pair], run: RunFloors) -> Floors:
    """Floors at the beginning of a step: what the parameters, and what was found before, bring in."""
    squares: dict[str, tuple[float, float]] = {}
    for path, pair in parameters.items():
        equal = equal_bits(pair)
        apart = 0.0 if equal else float(distance(pair.baseline.summary, pair.candidate.summary))
        size = float(norm(pair.baseline.summary))
        for owner in (path.rpartition(".")[0], "*"):
            before = squares.get(owner, (0.0, 0.0))
            squares[owner] = before[0] + apart * apart, before[1] + size * size
    relative = {path: math.sqrt(a / b) if b else 0.0 for path, (a, b) in squares.items()}
    return Floors(
        parameters=relative.pop("*", 0.0),
        own=relative,
        gradients=run.gradients,
        settings_differ=run.settings_differ,
    )
