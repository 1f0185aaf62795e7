"""Watch what the optimizer reads and writes: the sink of the taps on losses, gradients, state and parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from traindiff.core.observation import LOSS_SCALE, SKIPPED
from traindiff.core.torch_compat.autograd import version_of
from traindiff.errors import UnsupportedTensorError
from traindiff.observe.torch.hooks.loss_scale import ScalerListener
from traindiff.observe.torch.nonfinite import origin
from traindiff.observe.torch.nonfinite.context import WatchContext
from traindiff.observe.torch.nonfinite.frames import Frame, Line, Part
from traindiff.observe.torch.nonfinite.origin import Found
from traindiff.observe.torch.nonfinite.reading import Reading, is_declared
from traindiff.observe.torch.sharding.layout import kept_here

_LARGEST_STATISTICS = 1 << 16
"""Elements of a buffer above which it is read again only if its version has moved: it is no normalization's statistics,
which are written without moving it."""

Seen = tuple[str, str, Reading, Tensor | None]
"""Path and slot of a tensor, what was read of it, and itself, unless a device has yet to read it."""


class StepParts:
    """Receives what taps see, as `traindiff.observe.common.sink.Sink` says.

    Args:
        context: The watch.

    Attributes:
        skipped: Steps that a loss scaler has left out, with the loss scale, where that is known.
        guarded: `Containment.guarded`.
        altering: `Containment.altering`.
    """

    def __init__(self, context: WatchContext) -> None:
        self.progress = context.progress
        self.guarded = context.containment.guarded
        self.altering = context.containment.altering
        self.skipped: list[tuple[int, Reading | None]] = []
        self._reader = context.reader
        self._judging = context.judging
        self._weights = context.weights
        self._order = context.order
        self._context = context
        self._first: list[Seen] = []
        self._gradients: list[Seen] = []
        self._written: list[Seen] = []
        self._of_gradients: dict[str, Reading] = {}
        self._buffers: dict[str, tuple[int, Reading]] = {}
        self._loss_scale: Reading | None = None
        self._in_scaler = False
        self._leaves_out = False  # a scaler sees infinite gradients

    def emit(self, tensor: Tensor, *, phase: str, path: str, slot: str, stage: str = "", **_: Any) -> None:
        """Read a tensor; it is judged together with those that are seen with it."""
        if phase == "grad" and not stage:
            self._gradients.append(_seen(path, slot, self._reader.read(tensor), tensor))
        elif phase == "param" and slot == "buffer":
            self._judge_buffer(path, tensor)
        elif phase == "param":
            tensor, reading = self._read_parameter(tensor)
            if slot == "value":
                self._weights[path] = reading
            (self._first if stage else self._written).append(_seen(path, slot, reading, tensor))
        elif phase == "optimizer" and slot == SKIPPED:
            self.skipped.append((self.progress.step, self._loss_scale))
        elif phase == "optimizer" and (path in self._weights or slot == "lr"):
            self._written.append(_seen(path, slot, self._reader.read_again(tensor), tensor))
        elif phase == "loss" and path == LOSS_SCALE:
            self._loss_scale = self._reader.read_again(tensor)
        elif phase == "loss":
            reading = self._reader.read_again(tensor)
            self._judging.consider([reading], partial(self._of_loss, reading))

    def unobserved(self, *_: Any, **__: Any) -> None:
        """Parts without numbers cannot be judged."""

    def known(self, row: Any, tensor: Any) -> None:
        """`Sink.known`: nothing, so each tensor is judged by itself."""

    def again(self, known: Any, tensor: Any, *, micro_step: int, guarded: bool = True) -> bool:  # noqa: ARG002
        """`Sink.again`: nothing is known of any tensor."""
        return False

    def repeated(self, known: Any, tensors: Any, emit: Callable[[], None], *, about: Any = None) -> None:  # noqa: ARG002
        """`Sink.repeated`: each tensor by itself."""
        emit()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Judge what is seen inside the block at its end."""
        yield
        self.judge()

    def scaler_listener(self) -> ScalerListener:
        """Notices calls of `GradScaler.step`: infinite gradients in them are the scaler's business."""
        return ScalerListener(before=self._begin_scaler, after=self._end_scaler)

    def judge(self) -> None:
        """Judge what was seen since the last time."""
        first, gradients, written = self._first, self._gradients, self._written
        self._first, self._gradients, self._written = [], [], []
        for path, _, reading, tensor in first:
            self._judging.consider([reading], partial(origin.of_first_parameter, path, reading, tensor))
        if gradients:
            self._judge_gradients(gradients)
        if written:
            self._judge_written(written)

    def end_step(self) -> None:
        """A step has ended."""
        if self._leaves_out and self.progress.step not in [step for step, _ in self.skipped]:
            self.skipped.append((self.progress.step, self._loss_scale))  # on the device, by a fused optimizer
        self._leaves_out = False
        self._first, self._gradients, self._written = [], [], []
        self._of_gradients.clear()
        self._loss_scale = None

    def let_go(self) -> None:
        """Forget all tensors."""
        self.end_step()
        self._weights.clear()
        self._buffers.clear()

    def _read_parameter(self, tensor: Tensor) -> tuple[Tensor, Reading]:
        """Read what this rank keeps of a parameter, again: engines write without moving its version.

        What ZeRO stage 3 has gathered of the others may not be there yet: on a CPU it waits for its last gather alone.
        """
        try:
            tensor, _ = kept_here(tensor)
        except UnsupportedTensorError as error:
            reading = Reading(tensor)
            reading.reason = str(error)
            return tensor, reading
        return tensor, self._reader.read_again(tensor)

    def _judge_gradients(self, seen: list[Seen]) -> None:
        self._judging.drain()
        self._of_gradients.update((path, reading) for path, _, reading, _ in seen)
        for frame in _frames("gradient", seen).values():
            self._judging.consider([], lambda: None, frame=frame)
        readings = [reading for _, _, reading, _ in seen]
        if self._in_scaler and not self._scale_is_spent:
            self._judging.consider(readings, self._note_left_out)
        else:
            self._judging.consider(readings, lambda: self._worst(seen), settles=True)

    @property
    def _scale_is_spent(self) -> bool:
        """True if the loss scale is known to be 1 or less: then it is not what makes gradients infinite."""
        scale = None if self._loss_scale is None else self._loss_scale.extent
        return scale is not None and scale.largest <= 1.0

    def _note_left_out(self) -> None:
        self._leaves_out = True

    def _worst(self, seen: list[Seen]) -> Found:
        """The gradient that the backward pass has made first: that of the module which was called last."""
        bad = [one for one in seen if one[2].is_non_finite]
        path, _, reading, tensor = max(bad, key=lambda one: self._order.get(one[0].rpartition(".")[0], 0))
        return origin.of_parameter_gradient(path, reading, len(bad) - 1, tensor)

    def _judge_written(self, seen: list[Seen]) -> None:
        frames = _frames("optimizer", [one for one in seen if one[0] in self._weights])
        by_path: dict[str, list[Seen]] = {}
        for one in seen:
            by_path.setdefault(one[0], []).append(one)
        # Settings come first; then each parameter, its state before itself.
        for path, ones in sorted(by_path.items(), key=lambda item: item[0] in frames):
            readings = [reading for _, _, reading, _ in ones]
            self._judging.consider(readings, partial(self._of_step, path, ones), frame=frames.get(path), settles=True)

    def _of_step(self, path: str, seen: list[Seen]) -> Found | None:
        tensors = {f"{path} {slot}": tensor for _, slot, _, tensor in seen if tensor is not None}
        for _, slot, reading, _ in sorted(seen, key=lambda one: one[1] == "value"):
            if reading.is_non_finite:
                if slot == "lr":
                    return origin.of_setting(path, slot, reading)
                return origin.of_step(path, slot, reading, self._of_gradients.get(path), tensors)
        return None

    def _judge_buffer(self, path: str, tensor: Tensor) -> None:
        """A buffer may hold what it likes (masks, ranges yet to be measured), but not become NaN.

        The statistics of a normalization may not be infinite either.
        """
        version, before = self._buffers.get(path, (-1, None))
        if version == version_of(tensor) >= 0 and tensor.numel() > _LARGEST_STATISTICS:
            return
        reading = self._reader.read_again(tensor)
        self._buffers[path] = version_of(tensor), reading
        self._judging.consider([reading], partial(self._of_buffer, path, reading, before))

    def _of_loss(self, reading: Reading) -> Found:
        return origin.of_loss(reading, outputs=bool(self._order), meant=self._context.meant)

    def _of_buffer(self, path: str, reading: Reading, before: Reading | None) -> Found | None:
        first, measured = before is None, path.rpartition(".")[2] in ("running_mean", "running_var")
        if is_declared(f"{path} buffer", self._context.nonfinite):
            return None
        if (first and not measured) or (before is not None and before.is_non_finite):
            return None
        if not (measured or reading.is_nan):
            return None
        return origin.of_buffer(path, reading, first=first, meant=self._context.meant)

    def _begin_scaler(self, _: Optimizer) -> None:
        self._in_scaler = self.progress.loss_scaled

    def _end_scaler(self, _: Optimizer) -> None:
        self._in_scaler = False


def _frames(part: Part, seen: Iterable[Seen]) -> dict[str, Frame]:
    """A frame for each parameter, by its path."""
    frames: dict[str, Frame] = {}
    for path, slot, reading, _ in seen:
        frame = frames.setdefault(path, Frame(part=part, path=path, kind="Parameter"))
        frame.lines.append(Line(name=slot, reading=reading))
    return frames


def _seen(path: str, slot: str, reading: Reading, tensor: Tensor) -> Seen:
    return path, slot, reading, tensor if reading.has_arrived else None
