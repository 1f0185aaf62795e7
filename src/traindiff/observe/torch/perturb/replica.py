"""The interface of replicas, and the dispatch mode in which they compute operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Protocol

from torch import nn

from traindiff.core.site import ROOT, canonical_paths
from traindiff.core.torch_compat.compiling import is_compiled
from traindiff.core.torch_compat.modes import TorchDispatchMode
from traindiff.core.torch_compat.training import modules_by_name
from traindiff.errors import NotPerturbedError
from traindiff.observe.common.sink import Sink
from traindiff.observe.torch.hooks.compiled import ModuleObserver, tap_compiled_module
from traindiff.observe.torch.hooks.followed_modules import takes_hooks
from traindiff.observe.torch.hooks.out_of_sight import enter_mode, leave_mode

NAME = "replica"
"""Name of the tap that a fault in a perturbation disables."""


class Replica(Protocol):
    """One way to perturb a training within rounding."""

    def attach(self, sink: Sink) -> ExitStack:
        """Perturb the training from now on. Called before taps are attached, which see the perturbed values.

        Returns:
            Close it to end the perturbation.
        """


def compiled_parts(root: nn.Module) -> str:
    """Names of a few compiled modules of a model; empty if there are none."""
    compiled = [name or ROOT for name, module in modules_by_name(root).items() if is_compiled(module)]
    return ", ".join(compiled[:3]) + (", ..." if len(compiled) > 3 else "")


def notice_compiled(root: nn.Module, sink: Sink) -> ExitStack:
    """Report a fault if a module runs in compiled code. The training may compile a function around it at any time."""
    observer = ModuleObserver(output=sink.guarded(NAME, _fault))
    modules = modules_by_name(root)
    with ExitStack() as undo:
        for name in canonical_paths(modules):
            if takes_hooks(modules[name]):
                undo.enter_context(tap_compiled_module(modules[name], observer))
        return undo.pop_all()


def _fault(*_: Any) -> None:
    raise NotPerturbedError(
        "a part of the model ran in compiled code, where nothing is perturbed; record replicas without torch.compile"
    )


Compute = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]
"""Computes an operator from its arguments."""


class Dispatching(TorchDispatchMode):
    """Computes operators by `compute`, on this thread and in backward passes begun on it.

    An error in `compute` is reported to the sink, and the operator is computed without it. If that fails too, the
    error is the training's own.

    Args:
        compute: Called below autograd, with this mode off.
        sink: Receives errors.
        ends: Stop using `compute` after an error; otherwise the next operator is computed by it again.
    """

    def __init__(self, compute: Compute, sink: Sink, *, ends: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._compute = compute
        self._failed = sink.guarded(NAME, _raise)
        self._active = True
        self._ends = ends

    def enter(self) -> ExitStack:
        """Enter the mode. Close the result to leave it, whatever modes were entered since."""
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
        except Exception as error:  # noqa: BLE001  an error of ours or of the training
            result = func(*args, **kwargs)
            self._active = self._active and not self._ends
            self._failed(error)
            return result

    def _leave(self) -> None:
        self._active = False
        leave_mode(self)


def _raise(error: Exception) -> None:
    raise error
