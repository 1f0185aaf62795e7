"""File the values that a step of an optimizer reads and writes, and follow steps that Python calls."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.core.observation import NO_GRADIENT
from traindiff.observe.common.faults import Faults
from traindiff.observe.mindspore.forward_pass import Listener, listen
from traindiff.observe.mindspore.observations import Observations, read
from traindiff.observe.mindspore.targets import COUNT, RATE, Followed, Sight

TAP = "optimizer_step"
"""Name of the tap that a fault here disables."""

UNSEEN = "its gradient did not come into the optimizer as a dense tensor that can be seen there"


class StepTap:
    """Summarizes gradients, parameters, state and settings of one optimizer, step by step.

    Args:
        followed: The optimizer, and the values to read.
        observe: Phases that are observed, with `param` if updates are.
        selects: Whether the parameter with this path is observed.
        sink: Receives the observations.
        on_end: Called with the optimizer's name when a step has ended.
    """

    def __init__(
        self,
        followed: Followed,
        *,
        observe: Collection[str],
        selects: Callable[[str], bool],
        sink: Observations,
        on_end: Callable[[str], None],
    ) -> None:
        self.followed = followed
        self.steps = 0
        self._observe = observe
        self._selects = selects
        self._sink = sink
        self._on_end = on_end
        self._gradients: set[int] = set()
        self._recorded_before = -2
        self._begun = -1

    @property
    def observing(self) -> bool:
        """True if the current step is recorded."""
        return self._sink.progress.observing

    def begin(self) -> bool:
        """A step, or its forward pass, begins; gives whether to record the parameters before it."""
        step = self.steps
        if self._begun == step or not self.observing:
            return False
        self._begun = step
        self._gradients.clear()
        previous, self._recorded_before = self._recorded_before, step
        return "param" in self._observe and previous not in (step, step - 1)

    def settings(self) -> None:
        """Record the constant settings."""
        if self.observing and "optimizer" in self._observe:
            name = self.followed.name
            for (group, slot), value in self.followed.settings.items():
                self._emit(np.float64(value), phase="optimizer", path=f"{name}.groups[{group}]", slot=slot)

    def sight(self, sight: Sight, array: NDArray[Any]) -> None:
        """Record the value of one of MindSpore's parameters."""
        if self.observing and sight.phase in self._observe:
            if sight.slot in (RATE, COUNT):
                array = array.reshape(()).astype(np.float32)
            for path in sight.paths:
                self._emit(array, phase=sight.phase, path=path, slot=sight.slot, stage=sight.stage)

    def rate(self, rate: NDArray[Any]) -> None:
        """Record the learning rate that was computed for this step."""
        if self.observing and "optimizer" in self._observe:
            path = f"{self.followed.name}.groups[0]"
            self._emit(np.asarray(rate).reshape(()), phase="optimizer", path=path, slot=RATE)

    def wants_gradient(self, index: int) -> bool:
        """True if the gradient of the parameter at this place is recorded."""
        return self.observing and "grad" in self._observe and self._selects(self.followed.paths[index])

    def gradient(self, index: int, array: NDArray[Any]) -> None:
        """Record the gradient of the parameter at this place, as the optimizer is given it."""
        self._gradients.add(index)
        if self.wants_gradient(index):
            factor = self.followed.factor
            self._emit(array, phase="grad", path=self.followed.paths[index], slot="grad", factor=factor)

    def no_gradient(self, index: int, reason: str) -> None:
        """Record that the gradient at this place cannot be seen."""
        self._gradients.add(index)
        if self.wants_gradient(index):
            path, name = self.followed.paths[index], self.followed.name
            self._sink.unobserved(reason, phase="grad", path=path, slot="grad", optimizer=name)

    def complete(self) -> None:
        """Record which parameters' gradients were not seen in the step that ends."""
        for index in range(len(self.followed.paths)):
            if index not in self._gradients:
                self.no_gradient(index, UNSEEN)

    def end(self) -> None:
        """A step has ended."""
        self.steps += 1
        self._on_end(self.followed.name)

    def _emit(self, array: Any, *, phase: str, path: str, slot: str, stage: str = "", factor: float = 1.0) -> None:
        self._sink.emit(
            array, phase=phase, path=path, slot=slot, stage=stage, factor=factor, optimizer=self.followed.name
        )


def reason_for(gradient: object) -> str:
    """Why a gradient that is not a dense tensor is not observed."""
    if gradient is None:
        return f"{NO_GRADIENT}: the optimizer is given None"
    return f"a {type(gradient).__name__} has no dense elements"


class DirectSteps:
    """Follows the calls of one optimizer that are not part of compiled code.

    Args:
        tap: Files what is seen.
        before_step: Records the parameters before a step, unless that is done.
        faults: Keeps errors out of the training.
        pause: Called when a call begins: the compiled code inside it is not observed.
        resume: Called when the call ends.
    """

    def __init__(
        self,
        tap: StepTap,
        *,
        before_step: Callable[[], None],
        faults: Faults,
        pause: Callable[[], None],
        resume: Callable[[], None],
    ) -> None:
        self._tap = tap
        self._before_step = before_step
        self._faults = faults
        self._pause = pause
        self._resume = resume

    def attach(self) -> ExitStack:
        """Follow them. Close the result to end it."""
        listener = Listener(before=self._before, after=self._after, failed=self._resume)
        return listen({self._tap.followed.optimizer: listener})

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._pause()
        self._faults.run(TAP, lambda: self._read_before(args, kwargs))

    def _after(self, output: Any) -> None:  # noqa: ARG002
        self._resume()
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
