"""Replay the update of an optimizer in float64, so that it can be judged without another run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from traindiff.core.orthogonality import SIZE, TERMS
from traindiff.core.shards import Piece, Shard
from traindiff.core.torch_compat.cuda import is_capturing
from traindiff.observe.common.sink import Sink
from traindiff.observe.torch.hooks.compiled import CallObserver, tap_compiled_calls
from traindiff.observe.torch.hooks.step_hooks import has_closure, hook_after_step, hook_before_step
from traindiff.observe.torch.replay.batches import Batch, batches
from traindiff.observe.torch.replay.copied_range import (
    CopiedRange,
    in_roundings,
    is_divided,
    obstacle,
    of_real_numbers,
    plain,
    read_together,
)
from traindiff.observe.torch.replay.copying import WHOLE, Held, copy_elements
from traindiff.observe.torch.replay.formulas import Known, as_numbers, copied_settings, formula_of
from traindiff.observe.torch.replay.lbfgs import (
    LbfgsStart,
    is_lbfgs,
    lbfgs_stages,
    lbfgs_start,
    why_not,
)
from traindiff.observe.torch.replay.mistakes import mistakes
from traindiff.observe.torch.replay.muon_parts import division_of
from traindiff.observe.torch.replay.states import judged_states

FIRST = 3
"""The number of recorded steps that are replayed at the beginning of a run."""

COMPILED = "compiled"
"""What stands behind the optimizer if its step ran in compiled code: its results are read later, and other code may
have changed them."""

EVERY = 100
"""After these, one step in this many is replayed."""

CAPACITY_BYTES = 64 * 2**20
"""The most bytes of parameters, gradients and states that are copied during a step."""

WORK = 2**28
"""The most elements times their shorter side that formulas of whole matrices get in a step, after the first matrix."""

MOST_VARIANTS = 8
"""The number of parameters of a step for which all known mistakes are tried, if the replay does not fit; for others,
those mistakes are tried that explain one of these."""

BETTER = 0.5
"""A mistake is recorded if its residual (RMS) is less than this share of the right formula's."""


ROUNDINGS = 8.0
"""Relative rounding error of a mistaken update, in unit roundoffs, beside that of the right one."""


class OptimizerReplayTap:
    """Compares the updates of an optimizer with its own formula and settings, in some steps.

    The first three recorded steps are replayed, then one in a hundred. Before such a step parameters, gradients and
    states are copied: at most 16,384 elements of each parameter, and at most 64 MiB in all. Parameters and ranges that
    have no room take their turn in the next replayed step. After the step, recorded per parameter (phase `update`):

    * stage `replayed`: the update that the formula gives;
    * stage `taken`: the update that was made, new minus old parameter;
    * stage `rounding`: the largest difference of a correct optimizer from `replayed`, per element;
    * stage `residual`: (taken - replayed) / rounding, so between -1 and 1;
    * stage `variant[NAME]`: the residual of a formula with a known mistake, if that explains the update better;
    * stage `state[NAME]`: the residual of a tensor of the state after the step, if rounding does not explain it;
    * stage `terms`: of a matrix whose formula needs all of it, and of which this rank has rows or columns, instead of
      these: what adds up over ranks (`traindiff.core.orthogonality`).

    The slot is the optimizer whose formula it is.

    Args:
        optimizer: The optimizer.
        name: The name under which its steps are recorded.
        held: Gives each parameter with the number of its group and the pieces of the model's parameters in it.
        selects: Tells whether the parameter with a path is observed.
        sink: Receives the observations.
        state_of: Gives the state that the optimizer keeps of a parameter, if that is not in its `state` alone.
        capacity_bytes: The most bytes that are copied during a step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        name: str,
        held: Callable[[], Iterable[tuple[int, Tensor, Sequence[Piece]]]],
        selects: Callable[[str], bool],
        sink: Sink,
        state_of: Callable[[Tensor], Mapping[str, Any]] | None = None,
        capacity_bytes: int = CAPACITY_BYTES,
    ) -> None:
        self._optimizer = optimizer
        self._name = name
        self._parameters_held = held
        self._selects = selects
        self._sink = sink
        self._state_of = state_of or (lambda parameter: optimizer.state.get(parameter, {}))
        self._capacity = capacity_bytes
        self._known: Known | None = None
        self._replayed = 0
        self._latest = 0
        self._evaluation = 0  # of the loss, when the step began
        self._is_compiled = False
        self._turn = 0  # the first parameter to copy
        self._reached: dict[tuple[str, int], int] = {}  # by path and piece: where the next range begins
        self._copied: list[CopiedRange] = []
        self._lbfgs: LbfgsStart | None = None
        self._said: set[tuple[str, str]] = set()
        self._settle_guarded: Callable[[], None] = lambda: None
        self._rates: tuple[list[float | None], list[float | None]] = [], []  # of the latest two steps, by group

    def attach(self, *, around: Callable[[], ExitStack] = ExitStack) -> ExitStack:
        """Follow the optimizer's calls. Close the result to remove the tap and let go of all copies.

        Args:
            around: Attaches another tap of the optimizer, around this one: changes that the other makes to gradients
                before the step are replayed, changes after the step are not. Nor are those by hooks of the training.
        """
        guarded = partial(self._sink.guarded, "optimizer_replay")
        with ExitStack() as undo:
            undo.callback(self._let_go)
            undo.callback(hook_after_step(self._optimizer, guarded(self.after_step, idle=self._has_nothing)).remove)
            undo.enter_context(around())
            undo.callback(hook_before_step(self._optimizer, guarded(self.before_step)).remove)
            observer = CallObserver(begin=guarded(self._before_compiled))
            undo.enter_context(tap_compiled_calls(self._optimizer, observer))
            self._settle_guarded = guarded(self._settle)
            return undo.pop_all()

    def settle(self) -> None:
        """Replay a step that ran in compiled code; to be called after that code, when parameters can be read."""
        if self._is_compiled:
            self._settle_guarded()

    def before_step(self, *call: Any) -> None:
        """Copy the values that the step starts from, if it is one to replay."""
        self._let_go()  # of copies of a step that raised
        self._evaluation = self._sink.progress.evaluation
        self._rates = self._rates[1], [_rate(group) for group in self._optimizer.param_groups]
        if not self._is_due():
            return
        if is_lbfgs(self._optimizer):
            self._begin_lbfgs()
            return
        self._known = formula_of(self._optimizer)
        if self._known is None:
            self._not_replayed(f"no formula is known for {type(self._optimizer).__name__}")
            return
        # Reading a result would break the capture.
        if is_capturing():
            self._not_replayed("the step is captured in a CUDA graph")
            return
        parameters = list(self._parameters(self._known, has_closure=has_closure(*call)))
        if not parameters:
            return
        self._replayed += 1
        self._latest = self._step
        try:
            self._copy_ranges(self._known, parameters, has_closure=has_closure(*call))
        except BaseException:
            self._copied.clear()
            raise

    def after_step(self, *_: Any) -> None:
        """Replay the step and record the comparison."""
        if self._has_nothing():
            return
        try:
            if self._lbfgs is not None:
                self._replay_lbfgs(self._lbfgs)
            if self._copied and self._sink.progress.evaluation != self._evaluation:
                self._not_replayed("its step evaluates the loss several times")
                return
            read = read_together([one for copied in self._copied for one in copied.scalars()])
            unexplained = [
                copied for copied, size in zip(self._copied, self._replay_all(read), strict=True) if size > 1.0
            ]
            helpful: set[str] = set()
            for number, copied in enumerate(unexplained):
                self._try_mistakes(copied, helpful, read, everything=number < MOST_VARIANTS)
            if "(" not in self._label:
                self._judge_states(read)
        finally:
            self._let_go()

    def _has_nothing(self) -> bool:
        """True if nothing was copied before the step."""
        return not self._copied and self._lbfgs is None

    def _let_go(self) -> None:
        self._copied.clear()
        self._lbfgs = None

    def _begin_lbfgs(self) -> None:
        if reason := why_not(self._optimizer) or (self._is_compiled and "its step runs in compiled code"):
            self._not_replayed(reason)
            return
        self._replayed += 1
        self._latest = self._step
        self._lbfgs = lbfgs_start(self._optimizer)

    def _replay_lbfgs(self, start: LbfgsStart) -> None:
        """Replay a step of LBFGS, which updates all parameters together."""
        found, first = lbfgs_stages(self._optimizer, start, better=BETTER), 0
        for _, parameter, pieces in self._parameters_held():
            part, first = slice(first, first + parameter.numel()), first + parameter.numel()
            for piece in pieces if parameter.numel() else ():
                if not self._selects(piece.path):
                    continue
                if isinstance(found, str):
                    self._not_replayed(found, piece.path)
                    continue
                for stage, tensor in found.items():
                    self._sink.emit(
                        tensor[part].reshape(parameter.shape), phase="update", path=piece.path, slot="LBFGS",
                        stage=stage, optimizer=self._name,
                    )  # fmt: skip

    def _before_compiled(self) -> None:
        self._is_compiled = True
        self.before_step()

    def _settle(self) -> None:
        self.after_step()
        self._is_compiled = False

    @property
    def _label(self) -> str:
        """The optimizer, as the recording calls it."""
        label = type(self._optimizer).__name__ if self._known is None else self._known.label
        return f"{label}({COMPILED})" if self._is_compiled and "(" not in label else label

    @property
    def _step(self) -> int:
        return self._sink.progress.number_of(self._name)

    def _is_due(self) -> bool:
        return self._sink.progress.observing and (self._replayed < FIRST or self._step >= self._latest + EVERY)

    def _copy_ranges(self, known: Known, parameters: Sequence[Held], *, has_closure: bool) -> None:
        settings = [copied_settings(known, self._optimizer, group) for group in self._optimizer.param_groups]
        first, room, work, full = self._turn % len(parameters), self._capacity, 0, False
        for place in [*range(first, len(parameters)), *range(first)]:
            held = parameters[place]
            key = held.pieces[0].path, held.pieces[0].first
            whole, its_work = known.formula.needs_whole, held.work(known)
            part, placed = held.next_elements(self._reached.get(key, 0), self._capacity, whole=whole)
            size = (part.stop - part.start) * held.element_bytes
            if full or size > room or (work and work + its_work > WORK):
                if not full:
                    self._turn, full = place, True
                self._come_later(held)
                continue
            room, work = room - size, work + its_work
            self._reached[key] = (part.stop - held.pieces[0].first) % held.shards()[0][1].size
            self._copied.append(
                copy_elements(
                    self._optimizer, known, held, part, placed, settings=settings, rates=self._rates[0],
                    has_closure=has_closure, is_compiled=self._is_compiled,
                )
            )  # fmt: skip

    def _come_later(self, held: Held) -> None:
        for piece in held.pieces:
            self._sink.unobserved(
                "not replayed in this step: it comes in a later one", phase="update", path=piece.path,
                slot=self._label, stage="replayed", optimizer=self._name,
            )  # fmt: skip

    def _parameters(self, known: Known, *, has_closure: bool) -> Iterator[Held]:
        """Yield the tensors that this step will change and that can be replayed."""
        for number, parameter, pieces in self._parameters_held():
            if not parameter.numel() or not (has_closure or parameter.grad is not None):
                continue
            whole = known.formula.needs_whole
            divided = whole and any(is_divided(parameter, piece) for piece in pieces)
            fine = tuple(
                piece for piece in pieces if self._selects(piece.path) and self._can_replay(known, parameter, piece)
            )
            for held in [fine] if whole and fine else [(piece,) for piece in fine]:
                state = self._state_of(parameter)
                yield Held(number=number, parameter=parameter, pieces=held, state=state, divided=divided)

    def _can_replay(self, known: Known, parameter: Tensor, piece: Piece) -> bool:
        """True if the update of a piece, or a part of what it needs, can be replayed; if not, that is recorded."""
        name, whole = known.formula.name, known.formula.needs_whole
        if whole and is_divided(parameter, piece):
            adds_up = known.formula.terms is not None and division_of(piece.shard) is not None
            rest = ": only what adds up over ranks is checked" if adds_up else ""
            self._not_replayed(f"{name} needs the whole parameter, and each rank holds a part{rest}")
            if not adds_up:
                return False
        elif whole and parameter.numel() > WHOLE:
            self._not_replayed(
                f"{name} needs all {parameter.numel():,} elements at once, and at most {WHOLE:,} are replayed",
                piece.path,
            )
            return False
        if reason := obstacle(parameter, piece):
            self._not_replayed(reason, "" if whole else piece.path)
        return not reason

    def _replay_all(self, read: Callable[[Tensor], float]) -> list[float]:
        """The largest residual of each copied range. Synchronizes once per device for all of them."""
        worst = [one for batch in batches(self._copied, read) for one in self._replay(batch, read)]
        sizes = read_together(worst)
        return [sizes(one) for one in worst]

    def _judge_states(self, read: Callable[[Tensor], float]) -> None:
        """Record the states that are not what the formula gives."""
        found = [one for batch in batches(self._copied, read) for one in judged_states(batch, self._state_of, read)]
        sizes = [_sizes(one.residual()) for one in found]
        worst = [one.max() for one in sizes]
        largest = read_together(worst)
        for judged in (one for one, size in zip(found, worst, strict=True) if largest(size) > 1.0):
            stages = {"": judged.residual(), "=kept": judged.kept(), "=zero": judged.zero()}
            parts = {which: judged.batch.parts(one) for which, one in stages.items() if one is not None}
            for number, copied in enumerate(judged.batch.ranges):
                if float(_sizes(parts[""][number]).max()) > 1.0:
                    for which, of_ranges in parts.items():
                        self._emit(copied, of_ranges[number], f"state[{judged.name}{which}]")

    def _replay(self, batch: Batch, read: Callable[[Tensor], float]) -> list[Tensor]:
        """Record the updates of a batch, and return the largest residual of each range."""
        nothing = [torch.zeros((), dtype=torch.float64, device=one.elements.device) for one in batch.ranges]
        if batch.gradient is None:
            return nothing
        if batch.whole.divided:
            self._emit_terms(batch.whole, batch.gradient, read)
            return nothing
        try:
            update = batch.whole.replay(batch.gradient, read)
        except Exception as error:  # noqa: BLE001 - a user's formula may raise anything
            self._not_replayed(f"the formula of {batch.whole.formula.name} raised {type(error).__name__}: {error}")
            return nothing
        stages = update.stages(batch.taken())
        for copied, *parts in zip(batch.ranges, *map(batch.parts, stages.values()), strict=True):
            for stage, tensor in zip(stages, parts, strict=True):
                self._emit(copied, tensor, stage)
        return [one.max() for one in batch.parts(_sizes(stages["residual"]))]

    def _try_mistakes(
        self, copied: CopiedRange, helpful: set[str], read: Callable[[Tensor], float], *, everything: bool
    ) -> None:
        """Record the residuals of known mistakes that explain the update much better than the right formula."""
        gradient = copied.latest_gradient()
        if gradient is None:
            return
        taken, right = copied.taken(), copied.replay(gradient, read)
        limit = BETTER * float(right.residual(taken).square().mean().sqrt())
        start = copied.start(gradient, read, rounded=False)
        others = {where: plain(as_numbers(settings, float, short=False)) for where, settings in copied.others.items()}
        for mistake in mistakes(copied.formula, start, others):
            if not everything and mistake.name not in helpful:
                continue
            try:
                value = copied.varied(start, mistake.after, read)
            except (ArithmeticError, ValueError):
                continue  # e.g. a power of a negative number
            rounding = right.rounding + ROUNDINGS * copied.unit * value.abs()
            residual = in_roundings(taken - value, rounding)
            if float(residual.square().mean().sqrt()) < limit:
                self._emit(copied, residual, f"variant[{mistake.name}]")
                helpful.add(mistake.name)

    def _emit_terms(self, copied: CopiedRange, gradient: Tensor, read: Callable[[Tensor], float]) -> None:
        """Record this rank's terms of what adds up."""
        (placed,), make = copied.placed, copied.formula.terms
        division = division_of(placed.shard)
        if make is None or division is None or (copied.overflowed is not None and read(copied.overflowed)):
            return
        start = copied.start(gradient, read, rounded=False)
        vector = make(
            start.parameter, start.gradient, start.state, start.settings, division=division, path=placed.path,
            new=start.parameter + copied.taken().reshape(copied.shape), unit=copied.unit,
        )  # fmt: skip
        if vector is not None:
            self._sink.emit(
                vector, phase="update", path=placed.path, slot=self._label, stage=TERMS, optimizer=self._name,
                shard=Shard.whole((SIZE,)), merge="sum", term=division.first, micro_step=0,
            )  # fmt: skip

    def _emit(self, copied: CopiedRange, tensor: Tensor, stage: str) -> None:
        is_complex = copied.parameter.is_complex()
        for placed in copied.placed:
            part = slice(placed.part.start * 2, placed.part.stop * 2) if is_complex else placed.part
            shard = of_real_numbers(placed.shard) if is_complex else placed.shard
            self._sink.emit(
                tensor[part].reshape(shard.shape), phase="update", path=placed.path, slot=self._label,
                stage=stage, optimizer=self._name, shard=shard,
            )  # fmt: skip

    def _not_replayed(self, reason: str, path: str = "") -> None:
        """Record once why something is not replayed: the whole optimizer, or a parameter."""
        if (path, reason) not in self._said:
            self._said.add((path, reason))
            self._sink.unobserved(
                f"not replayed: {reason}", phase="update", path=path or self._name, slot=self._label,
                stage="replayed", optimizer=self._name,
            )  # fmt: skip


def _sizes(residual: Tensor) -> Tensor:
    """Magnitudes; 0 where a residual is not finite, which other rules judge."""
    return residual.abs().nan_to_num(nan=0.0)


def _rate(group: Mapping[str, Any]) -> float | None:
    """The learning rate of a group; None if reading it would wait for a device."""
    rate = group.get("lr")
    if isinstance(rate, Tensor):
        return rate.item() if rate.device.type == "cpu" and rate.numel() == 1 else None
    return float(rate) if isinstance(rate, (int, float)) else None
