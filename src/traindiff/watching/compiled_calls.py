"""Follow modules in compiled code, where only what they return is seen, and nothing can be raised."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn

from traindiff.site import ROOT, printable
from traindiff.taps.compiled import tap_compiled_module
from traindiff.taps.compiled_observers import ModuleObserver
from traindiff.taps.sink import Sink
from traindiff.watching import origin
from traindiff.watching.frames import Frame, Line
from traindiff.watching.judging import Judging
from traindiff.watching.masks import Masks
from traindiff.watching.origin import Found
from traindiff.watching.reading import Reader


class CompiledCalls:
    """Frames of outputs, and of gradients of them. They are judged when the compiled code has returned.

    Args:
        sink: Knows where the training is.
        guarded: Guards hooks.
        reader: Reads tensors.
        judging: Judges them.
        masks: What may hold -inf.
        called: Called with the path of a module that was called.
    """

    def __init__(
        self,
        *,
        sink: Sink,
        guarded: Callable[[Callable[..., None]], Callable[..., Any]],
        reader: Reader,
        judging: Judging,
        masks: Masks,
        called: Callable[[str], None],
    ) -> None:
        self._sink = sink
        self._guarded = guarded
        self._reader = reader
        self._judging = judging
        self._masks = masks
        self._called = called

    def attach(self, path: str, module: nn.Module) -> ExitStack:
        """Follow one module. Close the result to end that."""
        kind = printable(type(module).__name__)
        output, gradient = partial(self._output, path, kind), partial(self._gradient, path, kind)
        return tap_compiled_module(
            module, ModuleObserver(output=self._guarded(output), gradient=self._guarded(gradient))
        )

    def _output(self, path: str, kind: str, tensor: Tensor, slot: str) -> None:
        if not self._sink.progress.observing:
            return
        self._called(path)
        reading = self._reader.read_again(tensor)
        frame = Frame(part="forward", path=path, kind=kind, lines=[Line(name=slot, reading=reading)], note="compiled")
        masked = reading.is_non_finite and self._masks.excuse(f"{path or ROOT} {slot}", reading, tensor)
        judge: Callable[[], Found | None] = partial(origin.of_seen_output, path, slot, reading)
        self._judging.consider([reading], (lambda: None) if masked else judge, frame=frame, put_off=True)

    def _gradient(self, path: str, kind: str, tensor: Tensor, slot: str) -> None:
        if not self._sink.progress.observing:
            return
        reading = self._reader.read_again(tensor)
        line = Line(name=f"grad {slot}", reading=reading)
        frame = Frame(part="backward", path=path, kind=kind, lines=[line], note="compiled")
        judge = partial(origin.of_seen_gradient, path, slot, reading)
        self._judging.consider([reading], judge, frame=frame, put_off=True)
