"""Replay the update of an optimizer in float64, so that it can be judged without another run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from traindiff.core.kernels.torch_arrays import is_abstract
from traindiff.core.shards import Piece, Shard
from traindiff.observe.common.sink import Sink
from traindiff.observe.torch.hooks.compiled import CallObserver, tap_compiled_calls
from traindiff.observe.torch.hooks.replay_formulas import (
    Before,
    Rule,
    Units,
    moments_of,
    rule_name,
    rule_of,
    step_of,
    variants,
)
from traindiff.observe.torch.hooks.step_hooks import has_closure, hook_after_step, hook_before_step

FIRST = 3
"""The number of recorded steps that are replayed at the beginning of a run."""

EVERY = 100
"""After these, one step in this many is replayed."""

RANGE = 2**16
"""The number of elements of a parameter that are replayed in a step; the next replay takes the next ones."""

CAPACITY_BYTES = 64 * 2**20
"""The most bytes of parameters, gradients and moments that are copied during a step."""

MOST_VARIANTS = 8
"""The number of parameters of a step for which all known mistakes are tried, if the replay does not fit; for others,
those mistakes are tried that explain one of these."""

BETTER = 0.5
"""A mistake is recorded if its residual (RMS) is less than this share of the right formula's."""


class OptimizerReplayTap:
    """Compares the updates of an optimizer with its own formula and settings, in some steps.

    The first three recorded steps are replayed, then one in a hundred. Before such a step parameters, gradients and
    moments are copied: at most 65,536 elements of each parameter, and at most 64 MiB in all. Parameters and ranges that
    have no room take their turn in the next replayed step. After the step, recorded per parameter (phase `update`):

    * stage `replayed`: the update that the formula gives;
    * stage `taken`: the update that was made, new minus old parameter;
    * stage `rounding`: the largest difference of a correct optimizer from `replayed`, per element;
    * stage `residual`: (taken - replayed) / rounding, so between -1 and 1;
    * stage `variant[NAME]`: the residual of a formula with a known mistake, if that explains the update better.

    The slot is the optimizer whose formula it is.

    Args:
        optimizer: The optimizer.
        name: The name under which its steps are recorded.
        held: Gives each parameter with the number of its group and the pieces of the model's parameters in it.
        selects: Tells whether the parameter with a path is observed.
        sink: Receives the observations.
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
        capacity_bytes: int = CAPACITY_BYTES,
    ) -> None:
        self._optimizer = optimizer
        self._name = name
        self._parameters_held = held
        self._selects = selects
        self._sink = sink
        self._capacity = capacity_bytes
        self._rule = rule_name(optimizer)
        self._replayed = 0
        self._latest = 0
        self._evaluation = 0  # of the loss, when the step began
        self._turn = 0  # the first parameter to copy
        self._reached: dict[str, int] = {}  # by path: the element at which the next range begins
        self._copied: list[CopiedRange] = []
        self._said: set[tuple[str, str]] = set()

    def attach(self, *, around: Callable[[], ExitStack] = ExitStack) -> ExitStack:
        """Follow the optimizer's calls. Close the result to remove the tap and let go of all copies.

        Args:
            around: Attaches another tap of the optimizer, around this one: changes that the other makes to gradients
                before the step are replayed, changes after the step are not.
        """
        guarded = partial(self._sink.guarded, "optimizer_replay")
        with ExitStack() as undo:
            undo.callback(self._copied.clear)
            undo.callback(hook_after_step(self._optimizer, guarded(self.after_step)).remove)
            undo.enter_context(around())
            undo.callback(hook_before_step(self._optimizer, guarded(self.before_step)).remove)
            observer = CallObserver(begin=guarded(self._say_compiled))
            undo.enter_context(tap_compiled_calls(self._optimizer, observer))
            return undo.pop_all()

    def before_step(self, *call: Any) -> None:
        """Copy the values that the step starts from, if it is one to replay."""
        self._copied.clear()  # copies of a step that raised
        self._evaluation = self._sink.progress.evaluation
        if not self._is_due():
            return
        if not self._rule:
            self._not_replayed(f"not replayed: no formula is known for {type(self._optimizer).__name__}")
            return
        # Reading a result would break the capture.
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            self._not_replayed("not replayed: the step is captured in a CUDA graph")
            return
        parameters = list(self._parameters(has_closure=has_closure(*call)))
        if not parameters:
            return
        self._replayed += 1
        self._latest = self._step
        try:
            self._copy_ranges(parameters, has_closure=has_closure(*call))
        except BaseException:
            self._copied.clear()
            raise

    def after_step(self, *_: Any) -> None:
        """Replay the step and record the comparison."""
        try:
            if self._copied and self._sink.progress.evaluation != self._evaluation:
                self._not_replayed("not replayed: its step evaluates the loss several times")
                return
            unexplained = [copied for copied, size in zip(self._copied, self._replay_all(), strict=True) if size > 1.0]
            helpful: set[str] = set()
            for number, copied in enumerate(unexplained):
                self._try_variants(copied, helpful, everything=number < MOST_VARIANTS)
        finally:
            self._copied.clear()

    @property
    def _step(self) -> int:
        return self._sink.progress.steps.get(self._name, 0)

    def _is_due(self) -> bool:
        return self._sink.progress.observing and (self._replayed < FIRST or self._step >= self._latest + EVERY)

    def _copy_ranges(self, parameters: Sequence[tuple[Piece, Tensor, Rule]], *, has_closure: bool) -> None:
        first, room, full = self._turn % len(parameters), self._capacity, False
        for place in [*range(first, len(parameters)), *range(first)]:
            piece, parameter, rule = parameters[place]
            path, size = piece.path, parameter.numel() if piece.shard is None else piece.shard.size
            moments = moments_of(self._optimizer, self._optimizer.state.get(parameter, {}))
            sources = [parameter, *moments.values(), *([] if parameter.grad is None else [parameter.grad])]
            size_bytes = sum(one.element_size() for one in sources)
            start = self._reached.get(path, 0)
            count = min(RANGE, size - start, max(1, self._capacity // size_bytes))
            if full or count * size_bytes > room:
                if not full:
                    self._turn, full = place, True
                self._sink.unobserved(
                    "not replayed in this step: it comes in a later one", phase="update", path=path,
                    slot=self._rule, stage="replayed", optimizer=self._name,
                )  # fmt: skip
                continue
            room -= count * size_bytes
            self._reached[path] = (start + count) % size
            part = range(start, start + count)
            gradient = None if has_closure else parameter.grad
            self._copied.append(self._copy_range(piece, parameter, rule, part, gradient=gradient, moments=moments))

    def _copy_range(
        self,
        piece: Piece,
        parameter: Tensor,
        rule: Rule,
        part: range,
        *,
        gradient: Tensor | None,
        moments: Mapping[str, Tensor],
    ) -> CopiedRange:
        """Copy a range of a piece of a parameter, of its gradient and of its moments."""
        whole = piece.shard or Shard.whole(tuple(parameter.shape))
        flat = Shard(shape=(len(part),), global_shape=whole.global_shape, offset=(whole.start + part.start,))
        within = slice(piece.first + part.start, piece.first + part.stop)
        return CopiedRange(
            path=piece.path,
            parameter=parameter,
            part=within,
            shard=whole if len(part) == whole.size else flat,
            rule=rule,
            elements=_part(parameter, within).clone(),
            gradient=None if gradient is None else _part(gradient, within).clone(),
            state={name: _part(moment, within).clone() for name, moment in moments.items()},
            step=step_of(self._optimizer.state.get(parameter, {})),
            scale=_left_with(self._optimizer, "grad_scale"),
            overflowed=_left_with(self._optimizer, "found_inf"),
        )

    def _parameters(self, *, has_closure: bool) -> Iterator[tuple[Piece, Tensor, Rule]]:
        """Yield the parameters that this step will change and that can be replayed."""
        rules = [rule_of(self._optimizer, group) for group in self._optimizer.param_groups]
        for number, parameter, pieces in self._parameters_held():
            if not parameter.numel() or not (has_closure or parameter.grad is not None):
                continue
            for piece in pieces:
                if not self._selects(piece.path):
                    continue
                if reason := obstacle(parameter, piece):
                    self._not_replayed(f"not replayed: {reason}", piece.path)
                else:
                    yield piece, parameter, rules[number]

    def _replay_all(self) -> list[float]:
        """The largest residual of each copied parameter. Synchronizes once per device for all of them."""
        worst = [self._replay(copied) for copied in self._copied]
        sizes = [0.0] * len(worst)
        for device in dict.fromkeys(one.device for one in worst):
            places = [place for place, one in enumerate(worst) if one.device == device]
            for place, size in zip(places, torch.stack([worst[place] for place in places]).tolist(), strict=True):
                sizes[place] = size
        return sizes

    def _replay(self, copied: CopiedRange) -> Tensor:
        before = copied.before()
        if before is None:
            return torch.zeros((), dtype=torch.float64, device=copied.elements.device)
        update = copied.rule.replay(before, copied.units)
        taken = copied.taken()
        skipped = copied.overflowed
        value = update.value if skipped is None else torch.where(skipped.bool(), 0.0, update.value)
        residual = _in_roundings(taken - value, update.rounding)
        for stage, tensor in (
            ("replayed", value), ("taken", taken), ("rounding", update.rounding), ("residual", residual)
        ):  # fmt: skip
            self._emit(copied, tensor, stage)
        return residual.abs().amax()

    def _try_variants(self, copied: CopiedRange, helpful: set[str], *, everything: bool) -> None:
        """Record the mistakes that explain a residual. It may synchronize: something is wrong with the training.

        Args:
            copied: The parameter.
            helpful: Names of the mistakes that have explained another one; extended.
            everything: Try all mistakes that are known, not only these.
        """
        before = copied.before()
        if before is None:
            return
        taken = copied.taken()
        plain = copied.rule.replay(before, copied.units)
        limit = BETTER * float(_in_roundings(taken - plain.value, plain.rounding).square().mean().sqrt())
        for name, rule in variants(copied.rule):
            if not everything and name not in helpful:
                continue
            residual = _in_roundings(taken - rule.replay(before, copied.units).value, plain.rounding)
            if float(residual.square().mean().sqrt()) < limit:
                self._emit(copied, residual, f"variant[{name}]")
                helpful.add(name)

    def _emit(self, copied: CopiedRange, tensor: Tensor, stage: str) -> None:
        self._sink.emit(
            tensor.reshape(copied.shard.shape), phase="update", path=copied.path, slot=self._rule, stage=stage,
            optimizer=self._name, shard=copied.shard,
        )  # fmt: skip

    def _not_replayed(self, reason: str, path: str = "") -> None:
        """Record once why something is not replayed: the whole optimizer, or a parameter."""
        if (path, reason) not in self._said:
            self._said.add((path, reason))
            slot = self._rule or type(self._optimizer).__name__
            self._sink.unobserved(
                reason, phase="update", path=path or self._name, slot=slot, stage="replayed", optimizer=self._name
            )

    def _say_compiled(self) -> None:
        if self._is_due():
            self._not_replayed("not replayed: the optimizer's step is compiled")


def _in_roundings(residual: Tensor, rounding: Tensor) -> Tensor:
    """A residual in units of the rounding bound; NaN where it is not finite, which other rules judge."""
    return torch.where(residual.isfinite(), residual / rounding, torch.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedRange:
    """Copies of a range of a parameter's elements and of their gradient and state, in their own dtypes.

    Attributes:
        path: The path of the model's parameter.
        parameter: The optimizer's tensor, which holds elements of one parameter or of several.
        part: The range, in row-major order of `parameter`.
        shard: The place of the elements in the model's parameter.
        rule: The formula and settings by which the optimizer should update it.
        elements: The elements.
        gradient: Their gradient; None if a closure has yet to compute it.
        state: Moments of these elements.
        step: The optimizer's count of steps.
        scale: The loss scale, if the optimizer divides the gradient by it itself (fused, under a loss scaler).
        overflowed: A flag by which the optimizer was told that the gradients overflowed, so that it skips the step.
    """

    path: str
    parameter: Tensor
    part: slice
    shard: Shard
    rule: Rule
    elements: Tensor
    gradient: Tensor | None
    state: dict[str, Tensor]
    step: Tensor
    scale: Tensor | None
    overflowed: Tensor | None

    @property
    def units(self) -> Units:
        """The unit roundoffs of its numbers."""
        tensors = [self.elements, *self.state.values(), *([] if self.gradient is None else [self.gradient])]
        infos = [torch.finfo(tensor.dtype) for tensor in tensors]
        return Units(
            storage=infos[0].eps / 2.0,
            arithmetic=max(info.eps for info in infos) / 2.0,
            tiny=max(info.tiny for info in infos),
        )

    def before(self) -> Before | None:
        """The values that the step starts from, in float64; None if a closure left no gradient to replay.

        If a closure computes the gradient, it is the one that is there now.
        """
        gradient = self.gradient
        if gradient is None:
            if self.parameter.grad is None or self.parameter.grad.layout != torch.strided:
                return None
            gradient = _part(self.parameter.grad, self.part)
        gradient = gradient.to(torch.float64)
        if self.scale is not None:
            gradient = gradient / self.scale
        state = {name: moment.to(torch.float64) for name, moment in self.state.items()}
        return Before(parameter=self.elements.to(torch.float64), gradient=gradient, state=state, step=self.step)

    def taken(self) -> Tensor:
        """The elements as they are now minus what they were, float64, flat."""
        return _part(self.parameter, self.part).to(torch.float64) - self.elements.to(torch.float64)


def obstacle(parameter: Tensor, piece: Piece) -> str:
    """The reason why the update of a parameter cannot be replayed; empty if it can."""
    known = type(parameter.data) is Tensor or (piece.shard is not None and hasattr(parameter, "placements"))
    if not known:
        return f"the parameter is a {type(parameter.data).__name__}"
    if not parameter.is_floating_point():
        return f"the parameter is {str(parameter.dtype).removeprefix('torch.')}"
    if parameter.device.type in ("mps", "meta"):
        return f"there is no float64 on {parameter.device.type}"
    if parameter.grad is not None and is_abstract(parameter.grad):
        return f"the gradient is a {type(parameter.grad).__name__}"
    if parameter.grad is not None and parameter.grad.layout != torch.strided:
        return f"the gradient is {str(parameter.grad.layout).removeprefix('torch.')}"
    placements = [getattr(one, "placements", None) for one in (parameter, parameter.grad) if one is not None]
    if placements[0] != placements[-1]:
        return "the gradient is divided otherwise over ranks"
    if piece.shard is not None and not piece.shard.contiguous:
        return "this rank holds a part of it that is no range of its elements"
    return ""


def _part(tensor: Tensor, part: slice) -> Tensor:
    """Elements as they are now, flat; this rank's elements of a DTensor."""
    held: Any = tensor.detach()
    local: Tensor = held.to_local() if hasattr(held, "to_local") else held
    return local.reshape(-1)[part]


def _left_with(optimizer: Optimizer, name: str) -> Tensor | None:
    """A copy, in float64, of a tensor that a loss scaler leaves with an optimizer for the length of a step."""
    value = getattr(optimizer, name, None)
    return value.detach().to(torch.float64, copy=True) if isinstance(value, Tensor) else None
