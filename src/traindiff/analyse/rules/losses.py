"""The loss of a step, how it develops over the run, and what moved first if it or the gradient norm jumps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, ClassVar

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.indexed import sites
from traindiff.analyse.merge.recorded_calls import clips
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable
from traindiff.analyse.rules.optimizers import may_be_left_out
from traindiff.analyse.rules.rule import Contents, Limit, Rule
from traindiff.core.site import label
from traindiff.core.summary import norm_of, number

_LOSS = SiteKey("loss", "", "loss", "backward")


def loss_of(table: StepTable) -> tuple[MergedSite, float] | None:
    """The argument of `backward` and its value, relative to the global loss.

    None if it was not observed, is not finite, or if the step has several: the role of each is unknown.
    """
    entry = table.get(_LOSS)
    if entry is None or entry.unobserved or _LOSS._replace(call=1) in table:
        return None
    value = number(entry.summary)
    return (entry, value) if math.isfinite(value) else None


class _LossTrend(Rule):
    """Follows the first and the last losses of a run."""

    ends: ClassVar[int]
    """Number of steps at the beginning and at the end of a run that are compared."""

    needs = "a single loss above 0, on which backward() is called in each step"

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return loss_of(contents.table) is not None

    def begin(self) -> None:
        """Nothing was seen so far."""
        self._first: list[float] = []
        self._last: deque[tuple[int, float, int]] = deque(maxlen=self.ends)  # step, loss, place in the order
        self._num_steps = 0
        self._not_positive: tuple[int, float] | None = None  # step and loss
        self._began: tuple[int, MergedSite] | None = None

    def step(self, table: StepTable, *, step: int) -> None:
        """Note a step; the findings come at the end."""
        loss = loss_of(table)
        if loss is not None:
            entry, value = loss
            self._num_steps += 1
            if value <= 0.0:
                self._not_positive = self._not_positive or (step, value)
            self._began = self._began or (step, entry.without_parts())
            if len(self._first) < self.ends:
                self._first.append(value)
            self._last.append((step, value, entry.order))

    def why_unjudged(self) -> str:
        """A loss that is not positive."""
        if self._not_positive is None:
            return ""
        step, loss = self._not_positive
        return f"It needs {self.needs}; the loss of step {step} is {loss:.4g}"

    @property
    def _is_judged(self) -> bool:
        """True if there are enough losses, all of them positive."""
        return self._not_positive is None and self._num_steps >= max(self.limit("least_steps"), 2 * self.ends)


class LossDecreases(_LossTrend):
    """The median of the last 16 losses is not smaller than that of the first 16.

    A model that is nearly as good as it can get does not improve either, so the rule only warns, and only after 100
    steps. Only losses that are always positive are judged. For others (returns of a policy), and for trainings with
    several losses, it is unknown which value is better.
    """

    ends = 16
    name = "stalled-loss"
    finds = "The loss does not decrease."
    warns = True
    limits: ClassVar[Mapping[str, Limit]] = {
        "least_steps": Limit(default=100, message="steps that a run must have; fewer may be warm-up"),
    }

    def end(self) -> Iterator[Finding]:
        """Findings of the whole run."""
        if not self._is_judged or self._began is None:
            return
        began, ended = median(self._first), median(value for _, value, _ in self._last)
        if ended < began:
            return
        step, entry = self._began
        message = (
            f"The loss does not decrease: its median is {began:.5g} over the first {self.ends} steps, and {ended:.5g} "
            f"over the last {self.ends} of {self._num_steps}. Look at the learning rate, at the labels, and whether "
            "the loss depends on what is trained."
        )
        yield self.finding(entry, message, step=step, began=began, ended=ended, num_steps=self._num_steps)


class LossDoesNotDiverge(_LossTrend):
    """At the end, the losses are at least twice as large as at the beginning.

    Each of the last 5 losses is above each of the first 5, and the median of the last 5 is twice the largest of the
    first 5. Only losses that are always positive are judged. For others, and for trainings with several losses, it is
    unknown which value is worse.
    """

    ends = 5
    name = "diverging-loss"
    finds = "The loss ends far above where it began."
    limits: ClassVar[Mapping[str, Limit]] = {
        "factor": Limit(default=2.0, message="largest multiple of the first losses that the last ones may be"),
        "least_steps": Limit(default=20, message="steps that a run must have"),
    }

    def end(self) -> Iterator[Finding]:
        """Findings of the whole run."""
        if not self._is_judged or self._began is None:
            return
        began, ended = max(self._first), median(value for _, value, _ in self._last)
        if min(value for _, value, _ in self._last) <= began or ended <= self.limit("factor") * began:
            return
        step, _, order = self._last[0]
        entry = replace(self._began[1], order=order)
        message = (
            f"The loss ends at {ended:.4g}, {ended / began:.3g} x the largest of the first {self.ends} steps "
            f"({began:.4g}). Lower the learning rate, warm it up, or clip gradients."
        )
        yield self.finding(entry, message, step=step, began=began, ended=ended)


MEMORY = 0.1
"""Weight of a new size in the usual size: about the last ten steps count."""

LEAST_STEPS = 8
"""Steps after which the usual size is known."""

FACTOR = 3.0
"""A tensor has moved if it is this many times as large as usual, or as small,"""

TIMES = 6.0
"""and if it is also this many times as far from it as it usually is."""

_WITHIN = frozenset({"batch", "forward", "backward", "grad"})


@dataclass(slots=True, kw_only=True)
class _Usual:
    """Usual logarithm of a tensor's size, the usual distance from it, and the number of steps."""

    size: float
    distance: float = 0.0
    num_steps: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A tensor of unusual size: its step, the tensor, and the factor to its usual size."""

    step: int
    entry: MergedSite
    factor: float


UsualSizes = dict[SiteKey, _Usual]
"""Two numbers and a count for each site."""


def moved_first(table: StepTable, usual: UsualSizes, *, step: int) -> tuple[Moved | None, Moved | None]:
    """Note the sizes of a step in `usual`.

    Returns:
        The first tensor that has moved among batch, activations and gradients, and the first among learning rates and
        updates.
    """
    computed: Moved | None = None
    done: Moved | None = None
    for key, entry in sites(table, *_WITHIN, "optimizer", "update", stage=""):
        within = key.phase in _WITHIN
        rate = key.slot == "lr" and bool(key.group)
        if entry.unobserved or not (within or rate or key.phase == "update"):
            continue
        size = abs(number(entry.summary)) if rate else _size(entry)
        if not size or not math.isfinite(size):
            continue
        if key not in usual:
            usual[key] = _Usual(size=math.log(size))
            continue
        factor = _factor(usual[key], math.log(size))
        if factor == 1.0:
            continue
        moved = Moved(step=step, entry=entry.without_parts(), factor=factor)
        if within:
            computed = computed or moved
        else:
            done = done or moved
    return computed, done


def _factor(usual: _Usual, size: float) -> float:
    """Ratio of a size to its usual size, which it changes; 1 if that is not unusual."""
    away = size - usual.size
    unusual = abs(away) > max(math.log(FACTOR), TIMES * usual.distance)
    known = usual.num_steps >= LEAST_STEPS
    usual.num_steps += 1
    usual.size += MEMORY * away
    usual.distance += MEMORY * (abs(away) - usual.distance)
    return math.exp(min(away, 700.0)) if known and unusual else 1.0


def _size(entry: MergedSite) -> float:
    """Root mean square, so that a batch with fewer samples is not smaller."""
    count = int(entry.summary["count"])
    return norm_of(entry.summary) / math.sqrt(count) if count else 0.0


SPREAD = 1.4826
"""Turns the median distance from the median into a standard deviation, for normally distributed numbers."""


def usual_and_spread(values: Collection[float]) -> tuple[float, float]:
    """The median, and the deviation from it, which a few outliers do not change."""
    middle = median(values)
    return middle, SPREAD * median(abs(value - middle) for value in values)


WINDOW = 32
"""Number of steps that define the usual value."""

BEGINNING = 5
"""Number of first steps whose largest loss is the loss at the beginning."""


class NothingSpikes(Rule):
    """Losses or gradient norms are far above those of the steps before.

    The rule compares both with the median and the median deviation of the last 32 steps; the spike itself does not
    change these. A spike of the loss must also undo at least half of what the run had gained since it began, and double
    the loss. A spike of the gradient norm must also be 10 x the median, and twice as large as any norm before. So it is
    not a spike if a nearly perfect model gets one batch wrong. Trainings often recover (Chowdhery et al., PaLM, 2022,
    section 5.1: about 20 spikes, skipped over by hand), so the rule only warns.

    The finding names the tensor that moved first: the first one in execution order that is 3 x as large as usual, and 6
    x as far from its usual size as it usually is. If tensors moved in each of the steps before, it is the one with
    which that began: an activation may grow for several steps before the loss jumps.
    """

    name = "spike"
    finds = "The loss or the gradient norm jumps, with what moved first."
    kinds = ("loss-spike", "gradient-spike")
    warns = True
    limits: ClassVar[Mapping[str, Limit]] = {
        "deviations": Limit(default=10.0, message="distance from the median, in deviations; noise stays below 5"),
        "norm_factor": Limit(default=10.0, message="smallest multiple of the median gradient norm that is a spike"),
        "least_steps": Limit(default=16, message="steps that must have passed before anything is called unusual"),
    }

    def begin(self) -> None:
        """Nothing was seen so far."""
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._first_losses: list[float] = []
        self._largest_norm = 0.0
        self._usual: UsualSizes = {}
        self._began: Moved | None = None

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """Findings of a step."""
        computed, done = moved_first(table, self._usual, step=step)
        cause = self._began or computed
        self._began = cause or done if computed or done else None
        if (loss := loss_of(table)) is not None:
            yield from self._loss(*loss, cause, step=step)
        if (gradients := _gradient_norm(table)) is not None:
            yield from self._norm(*gradients, cause, step=step)

    def _loss(self, entry: MergedSite, value: float, cause: Moved | None, *, step: int) -> Iterator[Finding]:
        if len(self._losses) >= self.limit("least_steps"):
            usual, spread = usual_and_spread(self._losses)
            gained = max(0.0, max(self._first_losses) - usual)
            least = max(abs(usual), 0.5 * gained, self.limit("deviations") * spread)
            if value - usual > least:
                away = _deviations(value - usual, spread)
                message = f"The loss jumps to {value:.4g} from a median of {usual:.4g}{away}."
                yield self._jump(entry, message, cause, step=step, kind="loss-spike", value=value, median=usual)
        if len(self._first_losses) < BEGINNING:
            self._first_losses.append(value)
        self._losses.append(value)

    def _norm(self, entry: MergedSite, value: float, cause: Moved | None, *, step: int) -> Iterator[Finding]:
        if len(self._norms) >= self.limit("least_steps"):
            usual, spread = usual_and_spread(self._norms)
            least = max(
                usual + self.limit("deviations") * spread, self.limit("norm_factor") * usual, 2.0 * self._largest_norm
            )
            if value > least:
                away = _deviations(value - usual, spread)
                message = f"The norm of all gradients jumps to {value:.4g} from a median of {usual:.4g}{away}."
                yield self._jump(entry, message, cause, step=step, kind="gradient-spike", value=value, median=usual)
        self._largest_norm = max(self._largest_norm, value)
        self._norms.append(value)

    def _jump(
        self, entry: MergedSite, message: str, cause: Moved | None, *, step: int, kind: str, **evidence: Any
    ) -> Finding:
        if cause is None:
            return self.finding(entry, f"{message} No tensor moved before it.", step=step, kind=kind, **evidence)
        key = cause.entry.key
        where = f"the learning rate of {key.path}" if key.group else f"{key.phase} {label(key.path, key.slot)}"
        when = "" if cause.step == step else f" in step {cause.step}"
        message += f" What moved first is {where}{when}, {cause.factor:.3g} x as large as usual."
        evidence |= {"moved_first": where, "moved_in_step": cause.step, "moved_factor": cause.factor}
        return self.finding(entry, message, step=step, kind=kind, **evidence)


def _deviations(away: float, spread: float) -> str:
    return f", {away / spread:.3g} deviations" if spread else ""


def _gradient_norm(table: StepTable) -> tuple[MergedSite, float] | None:
    """Norm of all gradients before clipping, and its site; None in steps that a loss scaler leaves out."""
    if may_be_left_out(table):
        return None
    clipped = [(clip.entry, clip.norm) for clip in clips(table) if clip.norm is not None and math.isfinite(clip.norm)]
    if len(clipped) == 1:
        return clipped[0]
    gradients = [entry for _, entry in sites(table, "grad", stage="") if not entry.unobserved]
    if not gradients:
        return None
    whole = math.sqrt(sum(float(entry.summary["sum_of_squares"]) for entry in gradients))
    return max(gradients, key=lambda entry: norm_of(entry.summary)), whole
