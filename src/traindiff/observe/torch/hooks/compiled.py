"""Observe inside `torch.compile`: opaque operators that call the taps when the compiled code runs.

A hook on a module is traced into the compiled graph. Its code must be traceable, cause no graph break, and be the
same for all modules of a class, or each of a model's layers would be compiled anew. So a compiled hook only calls an
operator with the tensor, the *number* of the module (a tensor that each observed module carries, and thus an input of
the graph, not a constant in it) and a slot. The operators are registered as having ordered effects: compilers neither
drop, repeat nor reorder them. When the compiled code runs, an operator passes the tensor to the observers of the module
with that number; if there are none any more, it does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from traindiff.core.torch_compat.compiling import (
    compile_with_hooks,
    exclude_from_compilation,
    forget_compiled_code,
    is_dynamo_compiling,
    is_exporting,
    register_ordered_effect,
)
from traindiff.core.torch_compat.cuda import keep_out_of_cuda_graphs
from traindiff.core.torch_compat.training import own_parameters
from traindiff.observe.torch.hooks.followed_modules import HeldHooks
from traindiff.observe.torch.hooks.inert_on_copy import NUMBER, InertOnCopy, has_hooks_of_others, is_first_hook
from traindiff.observe.torch.hooks.nested import tensors
from traindiff.observe.torch.hooks.out_of_sight import out_of_sight


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleObserver:
    """Observes a module in compiled code, or the tensors that compiled code inspects.

    Attributes:
        output: Called with an output in the forward pass and its slot, or with an inspected tensor and its name. The
            tensor does not tell whether it requires a gradient.
        gradient: Called with the gradient of that output, and the slot.
        no_gradient: Called with the slot if the output is a parameter or an input: a hook on it in compiled code would
            never be removed.
    """

    output: Callable[[Tensor, str], None]
    gradient: Callable[[Tensor, str], None] = lambda *_: None
    no_gradient: Callable[[str], None] = lambda *_: None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallObserver:
    """Observes the forward passes of the root, or the steps of an optimizer, in compiled code.

    Attributes:
        begin: Called before one, when nothing is written yet; for the root with the inputs by slot, and `evaluating`.
        end: Called when it has ended; results of a step may be written only when the compiled code returns.
    """

    begin: Callable[..., None]
    end: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerObserver:
    """Observes calls of a layer in compiled code.

    Attributes:
        called: Called with the tensor that a call of a linear layer was given, the weight and the bias with which it
            computed, and what it returned. The module may hold other ones when the compiled code runs.
        returned: Called in backward passes, with the gradient of the output of a call, the tensor that the call was
            given, or None if the module has no weight that is trained, and whether the module was in training mode.
    """

    called: Callable[[Tensor, Tensor, Tensor | None, Tensor], None] = lambda *_: None
    returned: Callable[[Tensor, Tensor | None, bool], None] = lambda *_: None


@dataclass(slots=True, kw_only=True)
class _Observed:
    """The observers of a module or optimizer, and the hooks on it."""

    observers: list[Any] = field(default_factory=list)
    hooks: HeldHooks = field(default_factory=HeldHooks)


_modules: dict[int, _Observed] = {}
_calls: dict[int, _Observed] = {}  # of roots and optimizers
_layers: dict[int, _Observed] = {}
_numbers = count()
_tracing: list[ExitStack] = []  # per recording the same: closed, it restores the compiler's settings

_INSPECTED = -1
"""The number of the module to which inspected tensors belong."""


def tap_compiled_module(module: nn.Module, observer: ModuleObserver) -> ExitStack:
    """Have `observer` called with the module's outputs in compiled code. Close the result to remove it."""
    return _attach(module, observer, _modules, lambda hooks: hooks.after_forward(module, _Traced(_output_hook)))


def tap_compiled_calls(owner: nn.Module | Optimizer, observer: CallObserver) -> ExitStack:
    """Have `observer` called around the forward passes of a root, or the steps of an optimizer, in compiled code."""

    def hook(hooks: HeldHooks) -> None:
        if isinstance(owner, nn.Module):
            hooks.before_forward(owner, _Traced(_begin_hook), with_kwargs=True, prepend=True)
            hooks.after_forward(owner, _Traced(_end_hook))
        else:
            hooks.before_step(owner, _Traced(_begin_step_hook))
            hooks.after_step(owner, _Traced(_end_hook))

    return _attach(owner, observer, _calls, hook)


def tap_compiled_layer(module: nn.Module, observer: LayerObserver) -> ExitStack:
    """Have `observer` called with what a module is given and returns, if that is one tensor each.

    Backward passes have saved what layers with trained weights were given, so nothing is kept for it.
    """
    hook = _Traced(_layer_hook)
    return _attach(
        module, observer, _layers, lambda hooks: hooks.after_forward(module, hook, with_kwargs=True, prepend=True)
    )


def tap_compiled_inspection(observer: ModuleObserver) -> ExitStack:
    """Have `observer` called with tensors that compiled code inspects; the slot is their name."""
    operators()
    _modules.setdefault(_INSPECTED, _Observed()).observers.append(observer)
    undo = ExitStack()
    undo.callback(_remove, observer, _INSPECTED, _modules)
    return undo


def inspect_compiled(name: str, tensor: Tensor) -> None:
    """Observe an intermediate tensor; called while code is compiled."""
    _observe(tensor, None, name)


def trace_hooks() -> ExitStack:
    """Have code compiled anew, with the hooks that are there, and guarded by them. Close the result to end it.

    By default torch does not look for new hooks when it reuses code, for the module that it was compiled for or for
    another of its class, and the hooks would record nothing.
    """
    forget_compiled_code()
    _tracing.append(_tracing[0] if _tracing else _change_compiler())
    undo = ExitStack()
    undo.callback(_trace_no_hooks)
    return undo


def _change_compiler() -> ExitStack:
    changed = ExitStack()
    changed.callback(compile_with_hooks(has_hooks_of_others))
    changed.callback(keep_out_of_cuda_graphs([f"{_NAMESPACE}::{name}" for name in _OPERATORS]))
    return changed


def _trace_no_hooks() -> None:
    changed = _tracing.pop()
    if not _tracing:
        changed.close()


def _attach(
    module: nn.Module | Optimizer, observer: Any, registry: dict[int, _Observed], hook: Callable[[HeldHooks], None]
) -> ExitStack:
    operators()
    number = module.__dict__.get(NUMBER)
    if number is None:
        # Not an attribute in torch's sense: it is in no state_dict and moves with no `.to()`.
        number = module.__dict__[NUMBER] = torch.tensor(next(_numbers), device="cpu")
    key = int(number)
    with ExitStack() as undo:
        undo.callback(_detach, module, key, observer, registry)
        observed = registry.setdefault(key, _Observed())
        if not (observed.observers and observed.hooks.are_there()):
            observed.hooks.remove()
            hook(observed.hooks)
        observed.observers.append(observer)
        return undo.pop_all()


def _detach(module: nn.Module | Optimizer, key: int, observer: Any, registry: dict[int, _Observed]) -> None:
    _remove(observer, key, registry)
    if not any(key in one for one in (_modules, _calls, _layers)):
        module.__dict__.pop(NUMBER, None)  # compiled code is guarded by it, and compiled anew without us


def _remove(observer: Any, key: int, registry: dict[int, _Observed]) -> None:
    observed = registry[key]
    if observer in observed.observers:
        observed.observers.remove(observer)
    if not observed.observers:  # the hooks serve all observers, so they go with the last
        registry.pop(key).hooks.remove()


class _Traced(InertOnCopy):
    """A hook that does something while code is compiled, and nothing otherwise."""

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> None:
        if is_dynamo_compiling() and not is_exporting():  # an exported model is used without traindiff
            self._hook(*args)


def _output_hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001
    for slot, tensor in tensors(output, "output"):
        _observe(tensor, module._traindiff_number, slot)  # type: ignore[arg-type]  # set by _attach


def _observe(tensor: Tensor, number: Tensor | None, slot: str) -> None:
    torch.ops.traindiff.observe(tensor, number, slot)
    if tensor.requires_grad and tensor.is_leaf:
        torch.ops.traindiff.observe_no_gradient(number, slot)
    elif tensor.requires_grad:
        tensor.register_hook(lambda gradient: torch.ops.traindiff.observe_gradient(gradient, number, slot))


def _layer_hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    given = [tensor for _, tensor in [*tensors(args, "input"), *tensors(kwargs, "input")]]
    if len(given) != 1 or not isinstance(output, Tensor) or not is_first_hook(module):
        return
    number, is_training = module._traindiff_number, module.training
    is_computed = hasattr(type(module), "weight") or hasattr(type(module), "bias")  # to read it runs code
    if isinstance(module, nn.Linear) and not is_computed:
        torch.ops.traindiff.observe_product(given[0], module.weight, module.bias, output, number)
    own = own_parameters(module)
    if any(one.requires_grad for one in own.values()) and output.requires_grad and not output.is_leaf:
        weight = own.get("weight")
        x = given[0] if weight is not None and weight.requires_grad else None
        output.register_hook(lambda g: torch.ops.traindiff.observe_layer(g, x, number, is_training))


def _begin_hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    found = [*tensors(args, "input"), *tensors(kwargs, "input")]
    slots = "\n".join([slot for slot, _ in found])
    inputs = [tensor for _, tensor in found]
    torch.ops.traindiff.begin(module._traindiff_number, inputs, slots, not torch.is_grad_enabled())


def _begin_step_hook(optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG001
    torch.ops.traindiff.begin_step(optimizer._traindiff_number)


def _end_hook(owner: Any, args: Any, other: Any) -> None:  # noqa: ARG001
    torch.ops.traindiff.end(owner._traindiff_number)


@cache
def operators() -> torch.library.Library:
    """Define the operators, once."""
    library = torch.library.Library(_NAMESPACE, "DEF")  # kept alive by the cache
    for name, (arguments, run) in _OPERATORS.items():
        library.define(f"{name}({arguments}) -> ()")
        library.impl(name, run, "CompositeExplicitAutograd")
        library.impl(name, _do_nothing, "Meta")
        library.impl(name, _do_nothing, "FuncTorchBatched")  # under vmap, where no tensor can be read
        register_ordered_effect(getattr(torch.ops.traindiff, name).default)
    exclude_from_compilation(_Traced.__call__, callees=True)
    return library


def _do_nothing(*_: Any) -> None:
    """Stand for the operators while shapes are inferred."""


def _tell(registry: dict[int, _Observed], function: str, number: Tensor | None, *about: Any, **named: Any) -> None:
    """Call a function of all observers of the module or optimizer with this number; None for inspected tensors."""
    with out_of_sight():
        observed = registry.get(_INSPECTED if number is None else int(number))
    for observer in list(observed.observers) if observed else ():
        getattr(observer, function)(*about, **named)


def _tell_of_tensor(function: str, x: Tensor | None, module: Tensor | None, slot: str) -> None:
    if x is not None:  # else backward did not come this way
        _tell(_modules, function, module, x, slot)


def _tell_of_product(x: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor, module: Tensor) -> None:
    _tell(_layers, "called", module, x, weight, bias, output)


def _tell_of_layer(gradient: Tensor | None, x: Tensor | None, module: Tensor, training: bool) -> None:  # noqa: FBT001
    if gradient is not None:  # else backward did not come this way
        _tell(_layers, "returned", module, gradient, x, training)


def _tell_of_inputs(module: Tensor, inputs: list[Tensor], slots: str, evaluating: bool) -> None:  # noqa: FBT001
    found = list(zip(slots.split("\n") if slots else [], inputs, strict=True))
    _tell(_calls, "begin", module, found, evaluating=evaluating)


_NAMESPACE = "traindiff"
"""Of the operators: `torch.ops.traindiff.observe` and others."""

_OPERATORS: dict[str, tuple[str, Callable[..., None]]] = {
    "observe": ("Tensor x, Tensor? module, str slot", partial(_tell_of_tensor, "output")),
    "observe_gradient": ("Tensor x, Tensor? module, str slot", partial(_tell_of_tensor, "gradient")),
    "observe_no_gradient": ("Tensor? module, str slot", partial(_tell, _modules, "no_gradient")),
    "observe_product": ("Tensor x, Tensor weight, Tensor? bias, Tensor output, Tensor module", _tell_of_product),
    "observe_layer": ("Tensor gradient, Tensor? x, Tensor module, bool training", _tell_of_layer),
    "begin": ("Tensor module, Tensor[] inputs, str slots, bool evaluating", _tell_of_inputs),
    "begin_step": ("Tensor optimizer", partial(_tell, _calls, "begin")),
    "end": ("Tensor owner", partial(_tell, _calls, "end")),
}
"""By name: the operator's arguments, and what it does."""
