"""Observe what a step finds: parameters, buffers, and the modes of modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from traindiff.core.observation import BEFORE, EDITED, MASTER, MODE
from traindiff.core.torch_compat.autograd import inside_transform, storage_key, version_of
from traindiff.observe.torch.hooks.context import TapContext, emit_pieces
from traindiff.observe.torch.hooks.marks import Edit, emit_bit, mark_of
from traindiff.observe.torch.hooks.nested import as_tensor
from traindiff.observe.torch.hooks.optimizer_step import OptimizerTap
from traindiff.observe.torch.hooks.swapped_tensors import HoldsTensors


def attach(context: TapContext) -> None:
    """Observe parameters and buffers around each step. The tap ends with the session, as all events do."""
    tap, guarded = ModelStateTap(context), partial(context.sink.guarded, "model_state")
    if sees_all := tap.sees_all_changes:
        context.describe("sees_changes_between_steps", sees_all)
    context.events.before_forward.append(guarded(tap.before_forward))
    context.events.before_step.append(guarded(tap.before_step))
    context.events.on_joined.append(guarded(tap.joined))
    context.events.before_update.append(guarded(tap.before_step))
    context.events.after_step.append(guarded(tap.after_step))
    if "witness" in context.observe:
        context.events.before_any_step.append(guarded(tap.look_for_flips))


def master_weights(parameter: Tensor) -> Tensor | None:
    """The copy in a longer dtype that an optimizer updates in place of a parameter, as Megatron keeps it.

    None if there is none, or if this rank has a part of it only.
    """
    master = getattr(parameter, "main_param", None)
    if not isinstance(master, Tensor) or type(master.data) is not Tensor or type(parameter.data) is not Tensor:
        return None
    return master if master.shape == parameter.shape and master.dtype != parameter.dtype else None


class ModelStateTap(HoldsTensors):
    """Summarizes what no optimizer tap sees: initial and frozen parameters, and buffers.

    Parameters are recorded before the first step, and before each recorded step whose predecessor was not recorded,
    so that every update has both its ends. Parameters that no optimizer holds are also recorded before each step
    that finds them changed: the training updates them itself, or averages others into them. Those of them that require
    a gradient are recorded before steps 1, 2, 4, 8 and so on in any case, to show whether they ever change. Parameters
    that are copies of master weights (see `master_weights`) are recorded with these before every step. Parameters that
    something else than their optimizer changed since the step before are recorded as the step finds them. If one bit
    of one of them is another, and nothing wrote to it, the number of this bit is recorded (stage `flipped`); with
    the witness, also if it flips later, until the optimizer's step.

    Buffers are recorded with the parameters. After a step, those are recorded that may have been written: floating-
    point buffers (batch normalization writes its statistics without moving their version counter), and others whose
    counter has moved or that another tensor has replaced.

    Args:
        context: The training.
    """

    def __init__(self, context: TapContext) -> None:
        super().__init__()
        self._context = context
        self._sink = context.sink
        self._seen: dict[str, tuple[ReferenceType[Tensor], int]] = {}
        self._recorded_step = -2
        self._found_by: dict[str, int] = {}  # by path: the step of its optimizer before which it was last recorded
        self._looked_after = 0  # steps of optimizers
        self._tensors: dict[str, Callable[[], Tensor | None]] = {}
        self._unheld: dict[str, Mark] = {}  # by path: parameters that no optimizer holds, as they were last recorded
        self._looked_before = -1  # the step before which they were last looked at
        self._training = {path: module.training for path, module in context.targets.modules.items()}

    def before_step(self) -> None:
        """Record parameters and buffers, unless the step before was recorded.

        That is before the step's first forward pass, or before its update if no forward pass was seen.
        """
        progress = self._sink.progress
        if not progress.observing or inside_transform():  # `torch.func` puts its own tensors in place of the model's
            return
        recorded = {progress.step} if self._context.before_every_step else {progress.step, progress.step - 1}
        masters = self._masters()
        with self._sink.together():
            for path, master in masters.items():
                self._sink.emit(master, phase="param", path=path, slot=MASTER, stage=BEFORE)
        if self._recorded_step in recorded:
            self._parameters_before({*masters, *self._changed_by_none()})
            return
        self._recorded_step = progress.step
        self._mark_unheld()
        with self._sink.together():
            self._parameters_before(self._context.targets.parameters)
            for path, buffer in present_buffers(self._context.targets.root, self._context.targets.buffers):
                self._seen[path] = ref(buffer), version_of(buffer)
                self._sink.emit(buffer, phase="param", path=path, slot="buffer", stage=BEFORE)

    def _parameters_before(self, paths: Collection[str]) -> None:
        """Record the parameters with these paths as the step finds them."""
        holders = {id(holder): holder for path, holder in self._context.targets.parameters.items() if path in paths}
        progress, optimizers = self._sink.progress, self._context.optimizers
        stepped = {
            piece.path: (name, progress.number_of(name))
            for name, one in optimizers.items()
            for _, _, held in one.held()
            for piece in held
        }
        for parameter in holders.values():
            for piece in self._context.targets.pieces_of(parameter) or ():
                # Of several optimizers, the first to step ends the recorded step, and others step after it.
                name, number = stepped.get(piece.path, (progress.optimizer, progress.step))
                if piece.path in paths and self._found_by.get(piece.path) != number:
                    self._found_by[piece.path] = number
                    emit_pieces(
                        self._sink, parameter, [piece], phase="param", slot="value", stage=BEFORE,
                        optimizer=None if number == progress.step else name,
                    )  # fmt: skip

    def forget_tensors(self) -> None:
        """See `HoldsTensors`: other tensors take the place of all parameters."""
        self._seen.clear()
        self._tensors = dict.fromkeys(self._tensors, _gone)

    def before_forward(self) -> None:
        """Record which parameters were edited since an optimizer stepped, and which modules are in training mode.

        Modes are recorded as far as they have changed since the last pass with gradients. That may be inside a step:
        with several optimizers, the steps of one end in the middle of the loop.
        """
        progress = self._sink.progress
        if not progress.observing or not torch.is_grad_enabled():
            return
        steps = sum(progress.steps.values())
        if steps != self._looked_after and self._may_look:
            self._looked_after = steps
            self._edited_parameters()
        for path, module in self._context.targets.modules.items():
            if self._training.get(path) is not module.training:
                self._training[path] = module.training
                flag, call = as_tensor(module.training), self._sink.progress.next_call(path, MODE)
                self._sink.emit(flag, phase="forward", path=path, slot="training", stage=MODE, call=call)

    @property
    def sees_all_changes(self) -> bool:
        """True if each change of a parameter between two steps is noticed, whatever makes it."""
        return self._may_look and all(one.device.type == "cpu" for one in self._context.targets.parameters.values())

    @property
    def _may_look(self) -> bool:
        """False if others exchange parameters between steps: a lockstep, an engine, or a transform."""
        targets = self._context.targets
        return not (self._context.set_back or targets.layout.flat or targets.gathering or inside_transform())

    def _edited_parameters(self) -> None:
        replaced = self._replaced
        with self._sink.together():
            for tap in self._context.optimizers.values():
                for edit in tap.marks.edited():
                    emit_pieces(self._sink, edit.tensor, edit.pieces, phase="param", slot="value", stage=EDITED)
                    self._flipped(edit, tap)
            for path, parameter in replaced.items():
                pieces = self._context.targets.pieces_of(parameter) or ()
                emit_pieces(self._sink, parameter, pieces, phase="param", slot="value", stage=EDITED)
                self._unheld[path] = _mark(parameter)
        if replaced or not self._tensors:
            self._tensors = {path: ref(one) for path, one in self._context.targets.parameters.items()}

    def joined(self, steps: int) -> None:  # noqa: ARG002
        """The parameters of a rank that took further steps have come in the place of this rank's: that is no edit."""
        for tap in self._context.optimizers.values() if self._may_look else ():
            tap.marks.edited()

    def look_for_flips(self, tap: OptimizerTap) -> None:
        """Record a bit that has flipped in a parameter since the first forward pass of the step."""
        for edit in tap.marks.edited() if self._may_look else ():
            self._flipped(edit, tap)

    def _flipped(self, edit: Edit, tap: OptimizerTap) -> None:
        emit_bit(self._sink, edit, phase="param", slot="value", optimizer=tap.name)

    @property
    def _replaced(self) -> dict[str, nn.Parameter]:
        """The parameters whose place in the model another tensor has taken since edits were recorded, by path."""
        parameters, before = self._context.targets.parameters.items(), self._tensors
        return {path: one for path, one in parameters if path in before and before[path]() is not one}

    def _masters(self) -> dict[str, Tensor]:
        """Master weights by path."""
        parameters = self._context.targets.parameters.items()
        return {path: master for path, one in parameters if (master := master_weights(one)) is not None}

    def _held_by_none(self) -> dict[str, nn.Parameter]:
        """The parameters that no optimizer holds; before the first optimizer is known, those that need none."""
        optimizers = self._context.optimizers.values()
        held = {piece.path for one in optimizers for _, _, pieces in one.held() for piece in pieces}
        parameters = self._context.targets.parameters.items()
        return {path: one for path, one in parameters if path not in held and (held or not one.requires_grad)}

    def _mark_unheld(self) -> None:
        """Mark the parameters that no optimizer holds, as they are recorded now."""
        self._looked_before = self._sink.progress.step
        self._unheld = {path: _mark(one) for path, one in self._held_by_none().items()} if self._may_look else {}

    def _changed_by_none(self) -> Collection[str]:
        """Paths of the parameters that no optimizer holds and that are to be recorded before this step."""
        step = self._sink.progress.step
        if step == self._looked_before:
            return ()
        before, unheld, grows = self._unheld, self._held_by_none(), step & (step - 1) == 0
        self._mark_unheld()
        changed = {path for path, mark in self._unheld.items() if before.get(path, NO_MARK) != mark}
        return (changed | {path for path, one in unheld.items() if grows and one.requires_grad}) - self._replaced.keys()

    def after_step(self) -> None:
        """Record the buffers that may have been written."""
        if not self._sink.progress.observing:
            return
        if not self._sink.progress.unseen:  # else the parameters are recorded before the next step
            self._recorded_step = self._sink.progress.step
        for path, buffer in present_buffers(self._context.targets.root, self._context.targets.buffers):
            if buffer.is_floating_point() or self._is_new(path, buffer):
                self._seen[path] = ref(buffer), version_of(buffer)
                self._sink.emit(buffer, phase="param", path=path, slot="buffer")

    def _is_new(self, path: str, buffer: Tensor) -> bool:
        before, version = self._seen.get(path, (None, 0))
        return before is None or before() is not buffer or version != version_of(buffer)


def _gone() -> None:
    """In place of a weak reference to a tensor that is gone."""


Mark = tuple[int, int, bytes | None]
NO_MARK: Mark = (0, 0, None)


def _mark(parameter: Tensor) -> Mark:
    """Something that changes if a parameter does: where its bits cannot be read at once, its place and version."""
    bits = mark_of(parameter)
    return (0, 0, bits) if bits is not None else (storage_key(parameter), version_of(parameter), None)


def present_buffers(root: nn.Module, buffers: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that a model has now, by canonical path: a training may delete some, or set them to None.

    Args:
        root: The model.
        buffers: Their names for `root.get_buffer`, by canonical path.
    """
    for path, name in buffers.items():
        try:
            buffer = root.get_buffer(name)
        except AttributeError:
            continue
        if isinstance(buffer, Tensor):
            yield path, buffer
