"""Observe parameters before a step, and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from weakref import ReferenceType, ref

from torch import Tensor, nn

from traindiff.taps.pieces import PiecesOf, emit_pieces
from traindiff.taps.sink import Sink


class ModelStateTap:
    """Summarise what no optimizer tap sees: initial and frozen parameters, and buffers.

    Parameters are recorded before the first step, and again before each recorded step whose
    predecessor was not recorded, so that every update has both its ends. Buffers are recorded with
    them, and after a step those that may have been written: floating-point ones (batch normalisation
    writes its statistics without moving their version counter), and others whose counter has moved
    or that another tensor has replaced.

    Args:
        parameters: What holds them, by canonical path.
        pieces_of: What of which parameters such a tensor holds.
        buffers: What `root.get_buffer` calls them, by canonical path.
        root: The module that has the buffers.
        sink: Receives observations of phase `param`, slot `value` or `buffer`.
        before_every_step: Record them before each step, whatever was recorded before.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        pieces_of: PiecesOf,
        buffers: Mapping[str, str],
        root: nn.Module,
        sink: Sink,
        *,
        before_every_step: bool = False,
    ) -> None:
        self._parameters = parameters
        self._pieces_of = pieces_of
        self._buffers = buffers
        self._root = root
        self._sink = sink
        self._before_every_step = before_every_step
        self._seen: dict[str, tuple[ReferenceType[Tensor], int]] = {}
        self._recorded_step = -2

    def before_step(self) -> None:
        """Record parameters and buffers unless the step before was recorded."""
        progress = self._sink.progress
        recorded = {progress.step} if self._before_every_step else {progress.step, progress.step - 1}
        if not progress.observing or self._recorded_step in recorded:
            return
        self._recorded_step = progress.step
        with self._sink.together():
            for parameter in {id(one): one for one in self._parameters.values()}.values():
                pieces = [piece for piece in self._pieces_of(parameter) or () if piece.path in self._parameters]
                emit_pieces(self._sink, parameter, pieces, phase="param", slot="value", stage="before")
            for path, buffer in self._present_buffers():
                self._seen[path] = ref(buffer), buffer._version
                self._sink.emit(buffer, phase="param", path=path, slot="buffer", stage="before")

    def after_step(self) -> None:
        """Record the buffers that may have been written."""
        if not self._sink.progress.observing:
            return
        self._recorded_step = self._sink.progress.step
        for path, buffer in self._present_buffers():
            if buffer.is_floating_point() or self._is_new(path, buffer):
                self._seen[path] = ref(buffer), buffer._version
                self._sink.emit(buffer, phase="param", path=path, slot="buffer")

    def _is_new(self, path: str, buffer: Tensor) -> bool:
        before, version = self._seen.get(path, (None, 0))
        return before is None or before() is not buffer or version != buffer._version

    def _present_buffers(self) -> Iterator[tuple[str, Tensor]]:
        for path, name in self._buffers.items():
            try:
                buffer = self._root.get_buffer(name)
            except AttributeError:  # deleted since
                continue
            if isinstance(buffer, Tensor):  # not set to None since
                yield path, buffer
