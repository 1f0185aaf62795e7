"""What the floors of a step take from earlier steps, and which optimizers make of gradients something nonlinear."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from traindiff.analyse.merge.distance import Pair, equal_bits, size_of
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable
from traindiff.analyse.noise.seen_loss import SeenLoss
from traindiff.analyse.noise.seen_sums import SeenSums
from traindiff.analyse.noise.uncalibrated import GAIN, Floors
from traindiff.core.site import is_of_no_module
from traindiff.core.summary import UNIT_ROUNDOFF, distance, nonfinite_count, norm_of, rounding

LINEAR_STATE = frozenset({"momentum_buffer", "step"})
"""State slots of optimizers whose update is linear in the gradient."""

FIRST_MOMENTS = frozenset({"exp_avg", *LINEAR_STATE})
"""State slots that are linear in the gradient; others hold squares of it."""


APPROXIMATED = 1.1e-5
"""Relative error of recurrent layers whose kernel approximates tanh and sigmoid. Measured in float32 with cuDNN on an
H100: 4.3e-6 to 5.5e-6 for LSTM, GRU and RNN, of 8 to 256 positions and 16 to 128 units, where torch's own kernels there
and those of the CPU are at 1e-7 to 2e-7. This is twice as much."""

RECURRENT = frozenset({"LSTM", "GRU", "RNN"})
"""Class names of these layers."""


def is_quotient(key: SiteKey, adaptive: Collection[str]) -> bool:
    """True if an optimizer has divided this by a moment: an update, or a state that sums updates.

    Args:
        key: Of the site.
        adaptive: Parameters whose optimizer divides by a moment.
    """
    if key.path not in adaptive:
        return False
    # RMSprop's momentum averages quotients, and Adadelta accumulates them.
    return key.phase in ("update", "param") or (
        key.phase == "optimizer" and key.slot in ("momentum_buffer", "acc_delta")
    )


def adaptive_parameters(keys: Iterable[SiteKey]) -> set[str]:
    """Paths of the parameters whose optimizer divides by a moment of the gradient, such as Adam."""
    return {key.path for key in keys if key.phase == "optimizer" and key.slot not in LINEAR_STATE and not key.group}


@dataclass(slots=True)
class RunFloors:
    """Facts of earlier steps that the floors of later steps depend on.

    Attributes:
        gradients: Largest relative difference of each parameter's gradients so far in the run.
        adaptive: Parameters whose optimizer keeps a moment that it divides by.
        preconditioned: Parameters whose optimizer keeps a matrix beside them that is no matrix of their elements, as
            Shampoo does: it may compute inverses, roots or eigenvectors of it.
        preconditioners: Slots of these matrices.
        nonlinear: By parameter without one, whether its update is not linear; see `NonlinearUpdates`.
        settings_differ: Whether the optimizers are set differently.
        coefficients: Relative error that the optimizers' own coefficients may have.
        corrections: Relative error that bias corrections may have in this step.
        approximate: Paths of modules of which one run alone has a kernel that approximates; see `APPROXIMATED`.
        reduced_in: The shorter dtype in which a run reduces a gradient over its ranks, by the path of its parameter.
        states: Norm of each running average of an optimizer after the latest step.
        carried: How far each of them was apart then, if that was within its floor.
        exceeded_noise: Whether any site has exceeded its measured floor. From then on inputs differ by more than noise,
            and what follows from that is not a further divergence.
        permuted: Parameters that started with the same values in another order.
        learning_differs: Whether a loss, a gradient or an update (of permuted parameters, its norm) differs by more
            than its own rounding and than replicas do.
        learning_apart: Relative difference of all gradients of a step together, in the step in which it is largest.
        mixing: Whether an optimizer computes the update of a parameter from the gradients of all, as LBFGS does.
        judged_before: The step of the optimizer that was judged before this one; None if there is none.
        unseen_steps: Steps of the optimizer between that one, or the beginning, and this one, which were not compared.
        canceled: Norm of all gradients over the norm of their change since the evaluation before, where it was largest.
        latest: The baseline's gradients in the latest evaluation, by parameter.
        loss: What earlier steps tell of the loss.
        sums: What earlier steps tell of gradients of weights whose layers do not show what they read.
        undisturbed: The same as `gradients`, without differences that exceed noise.
        disturbed: Parameters with an initial value, a gradient, a state or an update that differs by more than noise.
        quiet: Floor of each site when it was last judged before any divergence.
    """

    gradients: dict[str, float] = field(default_factory=dict)
    undisturbed: dict[str, float] = field(default_factory=dict)
    loss: SeenLoss = field(default_factory=SeenLoss)
    disturbed: set[str] = field(default_factory=set)
    quiet: dict[SiteKey, float] = field(default_factory=dict)
    adaptive: set[str] = field(default_factory=set)
    preconditioned: set[str] = field(default_factory=set)
    preconditioners: set[str] = field(default_factory=set)
    nonlinear: dict[str, bool] = field(default_factory=dict)
    settings_differ: bool = False
    coefficients: float = 0.0
    corrections: float = 0.0
    approximate: Collection[str] = ()
    reduced_in: Mapping[str, str] = field(default_factory=dict)
    states: dict[SiteKey, float] = field(default_factory=dict)
    carried: dict[SiteKey, float] = field(default_factory=dict)
    exceeded_noise: bool = False
    permuted: set[str] = field(default_factory=set)
    learning_differs: bool = False
    learning_apart: float = 0.0
    mixing: bool = False
    judged_before: int | None = None
    unseen_steps: int = 0
    canceled: float = 1.0
    latest: dict[str, Any] = field(default_factory=dict)
    _judged: dict[str, int] = field(default_factory=dict)  # the latest step, by optimizer
    sums: SeenSums = field(default_factory=SeenSums)
    _passes: tuple[Floors, ...] = ()

    def at(self, optimizer: str, step: int, *, begun: int | None = None) -> None:
        """Note the step of an optimizer that is judged now, or one of its evaluations.

        Args:
            optimizer: Its name.
            step: The step.
            begun: The step with which both runs began, if this is the first that is judged; see `AlignedStep.first`.
        """
        latest = self._judged.get(optimizer)
        if step != latest:
            begun = step if begun is None else begun
            self.judged_before = latest
            self.unseen_steps = max(0, step - (begun if latest is None else latest + 1))
            self._judged[optimizer] = step

    def correction(self, key: SiteKey) -> float:
        """Relative error that bias corrections may put into an adaptive update; 0 for anything else."""
        return self.corrections if key.phase == "update" and key.path in self.adaptive else 0.0

    def approximated(self, pair: Pair) -> float:
        """Relative error of what approximate kernels compute: their outputs, and all losses and gradients.

        Also that of gradients which ranks reduce in a shorter dtype: what each rank has is rounded to it, and the sum.
        """
        if not (self.approximate or self.reduced_in):
            return 0.0
        key = pair.baseline.key
        reduced = rounding(self.reduced_in.get(key.path, "")) if key.phase == "grad" and key.stage != "micro" else 0.0
        u = max(UNIT_ROUNDOFF.get(one.dtype, 0.0) for one in (pair.baseline, pair.candidate))
        if not self.approximate or u > UNIT_ROUNDOFF["float32"] or not u:
            return reduced
        reached = key.path in self.approximate if key.phase == "forward" else key.phase in ("loss", "backward", "grad")
        return max(reduced, APPROXIMATED if reached else 0.0)

    def see_again(self, table: StepTable, entries: Sequence[MergedSite]) -> None:
        """Note a step that has the sites of the one before, and the same bits in both runs, and is not judged.

        Args:
            table: Its sites.
            entries: Those that are compared, in execution order.
        """
        self.note_states(entries)
        deque(self.loss.see(entries), maxlen=0)
        self.sums.see_again(table, self.loss.used())

    def note_states(self, entries: Iterable[MergedSite]) -> None:
        """Note the norms of the states of optimizers after a step, from the baseline's sites."""
        for entry in entries:
            if entry.key.phase == "optimizer":
                self.states[entry.key] = norm_of(entry.summary)

    def begin(self, pairs: Iterable[Pair], floors: tuple[Floors, ...]) -> None:
        """Note the floors of a step that begins.

        Of several optimizers, only the first to step ends the recorded step. The step of another one has no forward or
        backward pass of its own. Its gradients follow from the passes of the recorded step, and from a backward pass
        that belongs to the next one, which may enlarge the differences once more.
        """
        if any(pair.baseline.key.phase in ("forward", "backward") for pair in pairs):
            self._passes = floors
            return
        for own, before in zip(floors, self._passes, strict=False):
            own.flow, own.precision = GAIN * before.flow, before.precision


def at_the_beginning(parameters: Mapping[str, Pair], run: RunFloors) -> tuple[Floors, Floors]:
    """Floors at the beginning of a step, from the parameters and from earlier steps; then the undisturbed ones."""
    squares: dict[str, tuple[float, float, float]] = {}
    biases: tuple[dict[str, float], dict[str, float]] = {}, {}
    alone = 0.0
    # Where a map joins parameters last: how far these are apart is not known, and taken from the others.
    for path, pair in sorted(parameters.items(), key=lambda item: not item[1].baseline.placed):
        equal = equal_bits(pair)
        apart = 0.0 if equal else float(distance(pair.baseline.summary, pair.candidate.summary))
        if not (equal or pair.baseline.placed):
            apart = _apart_like_others(pair, squares, disturbed=path in run.disturbed)
        if not equal and nonfinite_count(pair.candidate.summary) != nonfinite_count(pair.baseline.summary):
            apart = math.inf  # the distance leaves out NaN, and all that is computed from it may be NaN
            run.disturbed.add(path)
        if pair.candidate.spread > pair.baseline.spread:  # ranks that should hold the same do not
            run.disturbed.add(path)
        calm = 0.0 if path in run.disturbed else apart
        apart = max(apart, pair.baseline.spread, pair.candidate.spread)
        size = norm_of(pair.baseline.summary)
        if size and is_of_no_module(path):  # a loss may be proportional to it, however small it is beside the model
            alone = max(alone, apart / size)
        module, _, name = path.rpartition(".")
        if name == "bias" and apart:
            count = math.sqrt(int(pair.baseline.summary["count"]))
            biases[0][module], biases[1][module] = apart / count, calm / count
        for owner in (_owner(path), "*"):
            before = squares.get(owner, (0.0, 0.0, 0.0))
            squares[owner] = before[0] + apart * apart, before[1] + calm * calm, before[2] + size * size
    disturbed, undisturbed = (
        {path: math.sqrt(found[which] / found[2]) if found[2] else 0.0 for path, found in squares.items()}
        for which in (0, 1)
    )
    return (
        Floors(
            parameters=max(alone, disturbed.pop("*", 0.0)), own=disturbed, biases=biases[0], gradients=run.gradients,
            settings_differ=run.settings_differ, coefficients=run.coefficients,
        ),
        Floors(
            parameters=undisturbed.pop("*", 0.0), own=undisturbed, biases=biases[1], gradients=run.undisturbed,
            coefficients=run.coefficients,
        ),
    )  # fmt: skip


def _owner(path: str) -> str:
    """The module that computes with a parameter: of a parametrized weight, the one that has the weight."""
    module, _, of_weight = path.partition(".parametrizations.")
    return module if of_weight else path.rpartition(".")[0]


def _apart_like_others(pair: Pair, squares: Mapping[str, tuple[float, float, float]], *, disturbed: bool) -> float:
    """How far two parameters without places may be apart: as far as all others are; any distance after a finding."""
    size, known = norm_of(pair.baseline.summary), size_of(pair)
    if disturbed or not math.isfinite(known):
        return size
    of_all, _, whole = squares.get("*", (0.0, 0.0, 0.0))
    return max(known, math.sqrt(of_all / whole) if whole else 0.0) * size


class GradientsTogether:
    """The difference of all gradients of a step together, and what an optimizer that mixes them makes of it.

    Args:
        run: Carried from step to step.
        pairs: All pairs of the step.
        searches: The loss is evaluated several times in the step, and replays judge what the optimizer did.
    """

    def __init__(self, run: RunFloors, pairs: Iterable[Pair], *, searches: bool = False) -> None:
        self._run = run
        self._apart = self._size = self._change = 0.0  # of all gradients
        updates = [one for one in pairs if _is_update(one)]
        self._moved = math.sqrt(sum(norm_of(one.baseline.summary) ** 2 for one in updates))
        self._length = _length_apart(updates) if searches and run.mixing else 0.0

    def length(self, pair: Pair) -> float:
        """Relative difference in how far a search has moved all parameters; 0 for what no search moves.

        A line search computes the length of its step from differences of losses, of which most cancels. The optimizer's
        replay judges it in each run.
        """
        return self._length if pair.baseline.key.phase in ("update", "optimizer") else 0.0

    def saw(self, pair: Pair, size: float) -> None:
        """Note the relative difference of a gradient."""
        whole = norm_of(pair.baseline.summary)
        if not math.isfinite(size) or pair.baseline.key.stage:
            return
        self._apart = math.hypot(self._apart, size * whole)
        self._size = math.hypot(self._size, whole)
        if self._run.mixing:
            path, summary = pair.baseline.key.path, pair.baseline.summary
            if (before := self._run.latest.get(path)) is not None:
                self._change = math.hypot(self._change, float(distance(before, summary)))
            self._run.latest[path] = np.array(summary)[()]  # a copy: a summary keeps its step's array in memory

    def finish(self) -> None:
        """Note the end of the step."""
        if self._size:
            self._run.learning_apart = max(self._run.learning_apart, self._apart / self._size)

    def floor(self, pair: Pair) -> float:
        """Floor of what an optimizer computes from all gradients together; 0 if the optimizer does not.

        LBFGS computes a direction from inner products of all gradients, and from the changes of gradients between
        evaluations, whose relative error is larger by the norm of gradients over the norm of the change. The error of a
        direction is spread over all parameters, so it is larger where a parameter's own part is small.
        """
        if not self._run.mixing:
            return 0.0
        if self._change:
            self._run.canceled = max(self._run.canceled, self._size / self._change)
        apart = max(self._run.learning_apart, self._apart / self._size if self._size else 0.0)
        own = norm_of(pair.baseline.summary)
        share = self._moved / own if _is_update(pair) and own else 1.0
        together = GAIN * self._run.canceled * max(apart, rounding(pair.baseline.dtype)) * max(1.0, share)
        return together + self.length(pair)


def _length_apart(updates: Iterable[Pair]) -> float:
    """The relative difference of two moves of all parameters in their common direction."""
    power = together = 0.0
    for pair in updates:
        baseline, candidate = pair.baseline.summary["sketch"], pair.candidate.summary["sketch"]
        power += float(baseline @ baseline)
        together += float(baseline @ candidate)
    return abs(together / power - 1.0) if power else 0.0


def _is_update(pair: Pair) -> bool:
    return pair.baseline.key[:2] == ("update", "")


def is_mixing(table: StepTable) -> bool:
    """True if an optimizer keeps vectors of all parameters together, or a history of vectors, as LBFGS does."""
    for key, entry in table.items():
        if key.phase == "optimizer" and not key.group and not entry.unobserved and len(entry.shape) == 1:
            own = table.get(SiteKey("param", "", key.path, "value"))
            count = int(entry.summary["count"])
            if count > 1 and (key.slot.endswith("]") or (own is not None and count > int(own.summary["count"]))):
                return True
    return False
