"""See every operator of a training, forward and backward, and compute some of them in another way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from traindiff.replicas.replica import NAME
from traindiff.taps.out_of_sight import enter_mode, leave_mode
from traindiff.taps.sink import Sink

Compute = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]
"""Computes an operator from its arguments."""


class Dispatching(TorchDispatchMode):
    """Has operators computed by `compute`, on this thread and in backward passes begun on it.

    An error in `compute` is reported to the sink, and the operator is computed as ever; if that fails too, it is the
    training's own error.

    Args:
        compute: Called below autograd, with this mode off.
        sink: Told about errors.
        ends: Whether an error ends the use of `compute`; if not, the next operator is computed by it again.
    """

    def __init__(self, compute: Compute, sink: Sink, *, ends: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._compute = compute
        self._failed = sink.guarded(NAME, _raise)
        self._active = True
        self._ends = ends

    def enter(self) -> ExitStack:
        """Compute so from now on. Close the result to end it, whatever modes were entered since."""
        undo = ExitStack()
        enter_mode(self)
        undo.callback(self._leave)
        return undo

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._active:
            return func(*args, **kwargs)
        try:
            return self._compute(func, args, kwargs)
        except Exception as error:  # noqa: BLE001  ours, or the training's
            result = func(*args, **kwargs)
            self._active = self._active and not self._ends
            self._failed(error)
            return result

    def _leave(self) -> None:
        self._active = False
        leave_mode(self)


def _raise(error: Exception) -> None:
    raise error
