"""Observe steps of an optimizer that Python calls: its gradients are what it is called with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from traindiff.mindspore.arrays import read
from traindiff.mindspore.cell_calls import Listener, listen
from traindiff.mindspore.step_tap import TAP, StepTap, reason_for
from traindiff.sessions.faults import Faults


class DirectSteps:
    """Follows the calls of one optimizer that are not part of compiled code.

    Args:
        tap: Files what is seen.
        before_step: Reads parameters as a step finds them, where that has not been done.
        faults: Keeps errors out of the training.
        pause: Called around a call with whether it has begun: then it is not to be observed from inside as well.
    """

    def __init__(
        self, tap: StepTap, *, before_step: Callable[[], None], faults: Faults, pause: Callable[[bool], None]
    ) -> None:
        self._tap = tap
        self._before_step = before_step
        self._faults = faults
        self._pause = pause

    def attach(self) -> ExitStack:
        """Follow them. Close the result to end it."""
        listener = Listener(before=self._before, after=self._after, failed=self._failed)
        return listen({self._tap.followed.optimizer: listener})

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._pause(True)  # noqa: FBT003  it has begun
        self._faults.run(TAP, lambda: self._read_before(args, kwargs))

    def _failed(self) -> None:
        self._pause(False)  # noqa: FBT003  it has ended

    def _after(self, output: Any) -> None:  # noqa: ARG002  whether the updates were made, which is seen
        self._pause(False)  # noqa: FBT003  it has ended
        self._faults.run(TAP, self._read_after)
        self._tap.end()

    def _read_before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tap = self._tap
        self._before_step()
        if not tap.observing:
            return
        tap.settings()
        for sight in tap.followed.rates:
            tap.sight(sight, read(sight.parameter))
        if tap.followed.schedule is not None:
            tap.rate(read(tap.followed.schedule()))
        gradients = args[0] if args else next(iter(kwargs.values()))
        for index, gradient in enumerate(gradients):
            if not hasattr(gradient, "asnumpy"):
                tap.no_gradient(index, reason_for(gradient))
            elif tap.wants_gradient(index):
                tap.gradient(index, read(gradient))

    def _read_after(self) -> None:
        tap = self._tap
        if not tap.observing:
            return
        tap.complete()
        for sight in tap.followed.after:
            tap.sight(sight, read(sight.parameter))
