"""What makes a training a replica, for as long as it is attached."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Protocol

from torch import nn

from traindiff.core.setting_checks import ReplicaSetting
from traindiff.core.site import ROOT, canonical_paths
from traindiff.core.torch_compat.execution import TorchDispatchMode, is_compiled
from traindiff.errors import ConfigError, NotPerturbedError, Problem
from traindiff.observe.common.sink import Sink
from traindiff.observe.torch.hooks.compiled import ModuleObserver, tap_compiled_module
from traindiff.observe.torch.hooks.followed_modules import takes_hooks
from traindiff.observe.torch.hooks.out_of_sight import enter_mode, leave_mode

NAME = "replica"
"""What a fault in a perturbation is filed under."""


class Replica(Protocol):
    """One way to perturb a training within rounding."""

    def attach(self, sink: Sink) -> ExitStack:
        """Perturb the training from now on; to be called before taps are attached, which see what it did.

        Returns:
            Close it to have the training as it was.
        """


def compiled_parts(root: nn.Module) -> str:
    """Names of the compiled modules of a model, a few of them; empty where there is none."""
    compiled = [name or ROOT for name, module in root.named_modules() if is_compiled(module)]
    return ", ".join(compiled[:3]) + (", ..." if len(compiled) > 3 else "")


def refuse_compiled(setting: ReplicaSetting, root: nn.Module) -> None:
    """Refuse a model of which a part is compiled.

    Raises:
        ConfigError: Names the parts.
    """
    among = compiled_parts(root)
    if not among:
        return
    problem = Problem(
        where=f'record(replica="{setting}")',
        what=f"cannot perturb compiled code, and the model has some: {among}.",
        fix="Record the replica of the same training without torch.compile; what it measures holds for both.",
    )
    raise ConfigError("record(...)", [problem], consequence="nothing was attached to the model")


def notice_compiled(root: nn.Module, sink: Sink) -> ExitStack:
    """Report a fault when a module runs in compiled code: a function that calls it may be compiled at any time."""
    observer = ModuleObserver(output=sink.guarded(NAME, _fault))
    modules = dict(root.named_modules())
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
