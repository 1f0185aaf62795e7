"""Observe steps of an optimizer that MindSpore compiles into a larger graph: operators in the graph call back.

The optimizer's `construct` is replaced by one that has an operator beside each tensor to observe. Nothing depends on
the results of these operators, so the graph computes what it would compute without them. They are declared to have
side effects: otherwise the compiler would remove them. This also keeps their order: parameters before the step,
gradients, parameters after the step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from inspect import signature
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops
from numpy.typing import NDArray

from traindiff.observe.common.faults import Faults
from traindiff.observe.mindspore.step_tap import TAP, StepTap
from traindiff.observe.mindspore.targets import Followed, Sight

PATIENCE_SECONDS = 60.0
"""How long to wait for a running graph."""

_NOTHING = np.zeros(1, dtype=np.float32)

See = Callable[[str, int, Any], None]


class _Callbacks:
    """The operators that are compiled into graphs with one optimizer. The graphs outlive the sessions.

    Attributes:
        see: Called with kind, place and value of each tensor; None while there is no session.
    """

    def __init__(self, followed: Followed) -> None:
        self.see: See | None = None
        self.before = self._operators("before", followed.before)
        self.rates = self._operators("rates", followed.rates)
        self.schedule = self._operator("schedule", 0)
        self.gradients = tuple(self._operator("gradients", index) for index in range(len(followed.paths)))
        self.after = self._operators("after", followed.after)

    def _operators(self, kind: str, sights: Sequence[Sight]) -> tuple[ops.Custom, ...]:
        return tuple(self._operator(kind, index) for index in range(len(sights)))

    def _operator(self, kind: str, index: int) -> ops.Custom:
        def call(array: Any) -> NDArray[np.float32]:
            if self.see is not None:
                self.see(kind, index, array)
            return _NOTHING

        operator = ops.Custom(call, out_shape=_shape_of_nothing, out_dtype=_dtype_of_nothing, func_type="pyfunc")
        operator.add_prim_attr("side_effect_io", True)  # noqa: FBT003  as MindSpore's own Print has it
        return operator


_compiled_in: WeakKeyDictionary[nn.Cell, dict[tuple[int, ...], _Callbacks]] = WeakKeyDictionary()
"""By optimizer and observed parameters: the operators that graphs may have been compiled with."""


class CompiledSteps:
    """Follows the steps of one optimizer inside compiled code.

    Args:
        tap: Files the values.
        faults: Keeps errors out of the training.
    """

    def __init__(self, tap: StepTap, faults: Faults) -> None:
        self._tap = tap
        self._faults = faults
        self._followed = tap.followed
        self._callbacks = _callbacks(tap.followed)
        self._construct: MethodType | None = None
        self._state = threading.Condition()
        self._waits_for = 0
        self._wants_before = False
        self._error: Exception | None = None
        self._thread = threading.get_ident()

    def attach(self) -> ExitStack:
        """Have graphs that are compiled from now on call back. Close the result to end it."""
        optimizer = self._followed.optimizer
        with ExitStack() as undo:
            if len(signature(optimizer.construct).parameters) != 1:
                return undo.pop_all()  # it takes more than gradients; its direct calls can be seen
            self._construct = _observed(self._followed, self._callbacks)
            undo.callback(self._let_go)
            self._callbacks.see = self._see
            object.__setattr__(optimizer, "construct", self._construct)
            return undo.pop_all()

    def pause(self) -> None:
        """Put the optimizer's own `construct` back while Python calls the optimizer itself."""
        if self._construct is not None:
            self._followed.optimizer.__dict__.pop("construct", None)

    def resume(self) -> None:
        """Put the observed `construct` in place again."""
        if self._construct is not None:
            object.__setattr__(self._followed.optimizer, "construct", self._construct)

    def settle(self) -> None:
        """Wait until the running graph has ended, if there is one.

        Raises:
            Exception: An error of a callback, in strict mode. Raised inside the graph, it would end the process.
        """
        if self._construct is None or threading.get_ident() != self._thread:
            return
        for parameter in tuple(self._followed.optimizer.parameters)[-1:]:
            parameter.asnumpy()  # waits for what computes it
        with self._state:
            self._state.wait_for(lambda: not self._waits_for, timeout=PATIENCE_SECONDS)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _let_go(self) -> None:
        self._callbacks.see = None
        self._followed.optimizer.__dict__.pop("construct", None)
        for name in [name for name in vars(self._followed.optimizer) if name.startswith("_traindiff_")]:
            object.__delattr__(self._followed.optimizer, name)
        self._construct = None

    def _see(self, kind: str, index: int, array: Any) -> None:
        """Called on the thread that runs the graph, in the order of `_construct`."""
        if not self._waits_for:
            self._waits_for = len(self._followed.after)
            self._contained(self._begin)
        self._contained(lambda: self._file(kind, index, array))
        if kind != "after":
            return
        if self._waits_for == 1:
            self._contained(self._tap.complete)
            self._contained(self._tap.end, always=True)
        with self._state:
            self._waits_for -= 1
            self._state.notify_all()

    def _contained(self, hook: Callable[[], None], *, always: bool = False) -> None:
        try:
            self._faults.run(TAP, hook, always=always)
        except Exception as error:  # noqa: BLE001  raised by `settle`, on the thread of the training
            self._error = error

    def _begin(self) -> None:
        self._wants_before = self._tap.begin()
        self._tap.settings()

    def _file(self, kind: str, index: int, array: Any) -> None:
        tap, followed = self._tap, self._followed
        if kind == "gradients":
            tap.gradient(index, _array(array, followed.optimizer.parameters[index]))
        elif kind == "schedule":
            tap.rate(np.asarray(array, dtype=np.float32))
        elif kind != "before" or self._wants_before:
            sight: Sight = getattr(followed, kind)[index]
            tap.sight(sight, _array(array, sight.parameter))


def _callbacks(followed: Followed) -> _Callbacks:
    """The operators for an optimizer: those of an earlier session if there was one, as they are in its graphs."""
    sights = (*followed.before, *followed.rates, *followed.after)
    seen = tuple(id(sight.parameter) for sight in sights)
    there = _compiled_in.setdefault(followed.optimizer, {})
    if seen not in there:
        there[seen] = _Callbacks(followed)
    return there[seen]


def _observed(followed: Followed, callbacks: _Callbacks) -> MethodType:
    """The optimizer's `construct` with the operators around it, which are kept as attributes of the optimizer."""
    optimizer = followed.optimizer
    attributes = {
        "before": callbacks.before,
        "rates": callbacks.rates,
        "schedule": callbacks.schedule,
        "gradients": callbacks.gradients,
        "after": callbacks.after,
        "found": tuple(sight.parameter for sight in followed.before),
        "held_rates": tuple(sight.parameter for sight in followed.rates),
        "left": tuple(sight.parameter for sight in followed.after),
        "construct": optimizer.construct,
    }
    for name, value in attributes.items():
        object.__setattr__(optimizer, f"_traindiff_{name}", value)
    return MethodType(_construct if followed.schedule is None else _construct_with_schedule, optimizer)


# MindSpore compiles these from source: the receiver must be named `self`, and the lengths of loops must be known.


def _construct(self, gradients):  # type: ignore[no-untyped-def]
    for index in range(len(self._traindiff_before)):
        self._traindiff_before[index](self._traindiff_found[index])
    for index in range(len(self._traindiff_rates)):
        self._traindiff_rates[index](self._traindiff_held_rates[index])
    for index in range(len(self._traindiff_gradients)):
        if isinstance(gradients[index], Tensor):  # a sparse one would end the training
            self._traindiff_gradients[index](gradients[index])
    result = self._traindiff_construct(gradients)
    for index in range(len(self._traindiff_after)):
        self._traindiff_after[index](ops.depend(self._traindiff_left[index], result))
    return result


def _construct_with_schedule(self, gradients):  # type: ignore[no-untyped-def]
    self._traindiff_schedule(self.get_lr())
    return _construct(self, gradients)  # type: ignore[no-untyped-call]


def _shape_of_nothing(shape: Any) -> tuple[int]:  # noqa: ARG001  called with the shape of the input
    return (1,)


def _dtype_of_nothing(dtype: Any) -> Any:  # noqa: ARG001  called with the dtype of the input
    return mindspore.float32


def _array(found: Any, parameter: Any) -> NDArray[Any]:
    """The input of an operator as an array; MindSpore gives tensors without axes as Python numbers."""
    if isinstance(found, np.ndarray):
        return found
    name = str(parameter.dtype).lower()
    return np.asarray(found, dtype=np.float32 if name == "bfloat16" else np.dtype(name))
