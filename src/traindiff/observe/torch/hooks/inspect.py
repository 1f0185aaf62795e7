"""`traindiff.inspect`: observe an intermediate tensor that no module returns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from traindiff.observe.torch.hooks.context import TapContext

T = TypeVar("T")

_observers: list[Callable[[str, Any], Any]] = []
_alterers: list[Callable[[str, Any], Any]] = []


def inspect(name: str, tensor: T) -> T:
    """Observe an intermediate tensor, forward and backward, in every recording that is running.

    Without a running recording this costs one test of an empty list. A name that is used several times in a step is
    numbered, never overwritten.

    Args:
        name: The site's path in the recording, e.g. `"attention.scores"`.
        tensor: Any tensor. For any other value, the recording says that it is no tensor.

    Returns:
        `tensor` itself; if the recording is a replica, `tensor` perturbed within rounding.
    """
    for alter in _alterers:
        if (altered := alter(name, tensor)) is not None:
            tensor = altered
    if _observers:
        _observe(name, tensor)
    return tensor


def _observe(name: str, tensor: object) -> None:
    from torch import Tensor
    from torch.compiler import is_compiling

    name = str(name)
    if is_compiling():
        from traindiff.core.torch_compat.compiling import is_exporting
        from traindiff.observe.torch.hooks.compiled import inspect_compiled

        if isinstance(tensor, Tensor) and not is_exporting():
            inspect_compiled(name, tensor)
        return
    name = name.encode("utf-8", "backslashreplace").decode("utf-8")  # a recording holds no other names
    for observe in _observers:
        observe(name, tensor)


def attach(context: TapContext) -> None:
    """Observe the tensors that `inspect` is called with."""
    from torch import Tensor

    from traindiff.errors import type_of
    from traindiff.observe.torch.hooks.activations import Activations
    from traindiff.observe.torch.hooks.compiled import ModuleObserver, tap_compiled_inspection

    activations, guard = Activations(context, tap="inspect"), context.sink.guarded

    def observe(name: str, tensor: object) -> None:
        if isinstance(tensor, Tensor):
            activations.observe(name, [("value", tensor)])
        else:
            activations.unobserved(name, "value", f"it is {type_of(tensor)}, and inspect observes tensors")

    compiled = ModuleObserver(
        output=guard("inspect", lambda tensor, name: activations.compiled_output(name, tensor, "value")),
        gradient=guard("inspect", lambda gradient, name: activations.compiled_gradient(name, gradient, "value")),
        no_gradient=guard("inspect", lambda name: activations.compiled_leaf(name, "value")),
    )
    context.undo.callback(activations.let_go)
    context.undo.enter_context(_listed(_observers, guard("inspect", observe)))
    context.undo.enter_context(tap_compiled_inspection(compiled))


def alter_inspected(alter: Callable[[str, Any], Any]) -> ExitStack:
    """Have `inspect` return the result of `alter`, unless that is None. Close the result to end it."""
    return _listed(_alterers, alter)


def _listed(functions: list[Callable[[str, Any], Any]], function: Callable[[str, Any], Any]) -> ExitStack:
    """Put a function into a list until the result is closed."""
    functions.append(function)
    undo = ExitStack()
    undo.callback(functions.remove, function)
    return undo
