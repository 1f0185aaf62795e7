"""Observe parameters before a step, and buffers."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from traindiff.taps.sink import Sink


class ModelStateTap:
    """Summarise what no optimizer tap sees: initial and frozen parameters, and buffers.

    Parameters are recorded before the first step, and again before each recorded step whose
    predecessor was not recorded, so that every update has both its ends. Buffers are recorded with
    them, and after a step if they were written (their version counter has moved).

    Args:
        parameters: By canonical path.
        buffers: By canonical path.
        sink: Receives observations of phase `param`, slot `value` or `buffer`.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor], sink: Sink) -> None:
        self._parameters = parameters
        self._buffers = buffers
        self._sink = sink
        self._versions: dict[str, int] = {}
        self._recorded_step = -2

    def before_step(self) -> None:
        """Record parameters and buffers unless the step before was recorded."""
        progress = self._sink.progress
        if not progress.observing or self._recorded_step in (progress.step, progress.step - 1):
            return
        self._recorded_step = progress.step
        for path, parameter in self._parameters.items():
            self._sink.emit(parameter, phase="param", path=path, slot="value", stage="before")
        for path, buffer in self._buffers.items():
            self._versions[path] = buffer._version
            self._sink.emit(buffer, phase="param", path=path, slot="buffer", stage="before")

    def after_step(self) -> None:
        """Record the buffers that were written."""
        if not self._sink.progress.observing:
            return
        self._recorded_step = self._sink.progress.step
        for path, buffer in self._buffers.items():
            if self._versions.get(path) != buffer._version:
                self._versions[path] = buffer._version
                self._sink.emit(buffer, phase="param", path=path, slot="buffer")
