"""The hooks through which subscribers follow a model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from traindiff.compat.onnxruntime.inspecting import Telling, _InspectActivation, end_of_forward, observed
from traindiff.compat.onnxruntime.run_context import (
    RuntimeStates,
    SubscriberBase,
    is_exporting,
    is_recomputed,
    is_traced,
)
from traindiff.core.site import canonical_paths
from traindiff.core.torch_compat.compiling import not_traced
from traindiff.core.torch_compat.training import is_data_parallel_copy, modules_by_name
from traindiff.errors import ConfigError, Problem, type_of
from traindiff.observe.common.circumstances import close_at_exit
from traindiff.observe.torch.hooks.nested import replaced, tensors

Kind = TypeVar("Kind", bound=SubscriberBase)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The facts about the model that a subscriber gets when it is subscribed.

    Attributes:
        modules: Class of each module, by canonical path.
        sites: Canonical path and slot, by the name of an output.
    """

    modules: dict[str, str]
    sites: dict[str, tuple[str, str]]


class NotSubscribedError(ConfigError, RuntimeError):
    """A `ConfigError` that is a `RuntimeError`, too, as in the original: there is no subscriber for what was asked."""


class SubscriberManager:
    """Has subscribers follow a model."""

    def __init__(self) -> None:
        self._run_ctx = RuntimeStates()
        self._handles: list[Any] = []
        close_at_exit(self)

    def subscribe(self, module: nn.Module, subscribers: Sequence[SubscriberBase]) -> None:
        """Have subscribers follow a model, from its next forward pass on, which is step 0.

        Those of an earlier call are told no more, and their hooks are removed.

        Args:
            module: The model, before or after it is wrapped in an ORTModule.
            subscribers: Who follows.

        Raises:
            ConfigError: It is no module, or one of them is no subscriber. Nothing was attached.
        """
        _check(module, subscribers)
        self.unsubscribe()
        root = _inside_ortmodule(module)
        self._run_ctx = RuntimeStates()
        self._run_ctx.number(root)
        named = canonical_paths(modules := modules_by_name(root))
        by_module = {one: named[path] for path, one in modules.items() if path in named}
        model = Model(modules={path: type(one).__name__ for one, path in by_module.items()}, sites={})
        for one in subscribers:
            one.begin(model)
        self._run_ctx.subscribers = list(subscribers)
        for inner, index in self._run_ctx.global_states.module_to_module_index.items():
            hook = _after_module(self._run_ctx, index, by_module.get(inner, ""), model)
            self._handles.append(inner.register_forward_hook(hook))
        self._handles.append(root.register_forward_hook(_after_model(self._run_ctx)))

    def unsubscribe(self) -> None:
        """Remove all hooks, and complete what the subscribers write. The original has no way to."""
        self.close()

    def close(self) -> None:
        """The same, under the name that all sessions have for it."""
        while self._handles:
            self._handles.pop().remove()
        self._run_ctx.let_go()
        subscribers, self._run_ctx.subscribers = self._run_ctx.subscribers, []
        for one in subscribers:
            one.close()

    def get_subscriber(self, subscriber_type: type[Kind]) -> Kind:
        """The subscriber of a type.

        Raises:
            NotSubscribedError: There is none.
        """
        for one in self._run_ctx.subscribers:
            if isinstance(one, subscriber_type):
                return one
        fix = "Give one to GlobalSubscriberManager.subscribe(model, [...]) first."
        where = f"get_subscriber({subscriber_type.__name__})"
        raise _refused(where, what="finds none that is subscribed.", fix=fix, kind=NotSubscribedError)

    def get_run_context(self) -> RuntimeStates:
        """The state of the subscription, for `_InspectActivation.apply`."""
        return self._run_ctx


# Hooks are closures: ORTModule copies the model that it exports, and with it hooks that are objects, but no functions.
# They write files, which `torch.compile` cannot trace.


def _after_module(context: RuntimeStates, index: int, path: str, model: Model) -> Callable[..., Any]:
    told: dict[str, Telling] = {}

    def hook(module: nn.Module, _: Any, output: Any) -> Any:
        if _is_copy(module, context):
            return None
        changed = {}
        for number, (slot, tensor) in enumerate(tensors(output, "output")):
            name = f"{type(module).__name__}_{index}_{number}th_output"
            model.sites[name] = (path, slot)
            telling = told.setdefault(name, Telling(context))
            changed[id(tensor)] = observed(name, index, context, tensor, telling)
        return replaced(output, changed) if is_traced() else None

    return not_traced(hook)


def _after_model(context: RuntimeStates) -> Callable[..., Any]:
    def hook(module: nn.Module, _: Any, output: Any) -> Any:
        if _is_copy(module, context):
            return None
        if is_traced():
            held: list[Tensor] = [tensor for _, tensor in tensors(output, "output")]
            ends = end_of_forward(context, held)
            return replaced(output, {id(old): new for old, new in zip(held, ends, strict=True)})
        if not is_exporting() and not is_recomputed():
            context.global_states.execution_step += 1
        return None

    return not_traced(hook)


def _is_copy(module: nn.Module, context: RuntimeStates) -> bool:
    """True if a module is a copy of one that is followed, which has its hooks, too: that of an average of weights.

    ORTModule exports a copy, and `DataParallel` runs replicas: those are followed.
    """
    followed = module in context.global_states.module_to_module_index
    return not (followed or is_traced() or is_exporting() or is_data_parallel_copy(module))


def _inside_ortmodule(module: nn.Module) -> nn.Module:
    ortmodule: Any = sys.modules.get("onnxruntime.training.ortmodule")
    if ortmodule is not None and isinstance(module, ortmodule.ORTModule):
        inner: nn.Module = module.module
        return inner
    return module


def _check(module: object, subscribers: object) -> None:
    if not isinstance(module, nn.Module):
        fix = "Give the model, a torch.nn.Module."
        raise _refused("subscribe(module=...)", what=f"is {type_of(module)}.", fix=fix)
    fix = 'Give some, e.g. [StatisticsSubscriber(output_dir="pt_out")].'
    if not isinstance(subscribers, Collection):
        raise _refused("subscribe(subscribers=...)", what=f"is {type_of(subscribers)}, and no list.", fix=fix)
    if not subscribers:
        what = "is empty: nobody would follow the model."
        raise _refused("subscribe(subscribers=...)", what=what, fix=fix, kind=NotSubscribedError)
    for one in subscribers:
        if not isinstance(one, SubscriberBase):
            fix = "Give subscribers of traindiff.compat.onnxruntime, not those of onnxruntime itself."
            raise _refused("subscribe(subscribers=...)", what=f"holds {type_of(one)}.", fix=fix)


def _refused(where: str, *, what: str, fix: str, kind: type[ConfigError] = ConfigError) -> ConfigError:
    problem = Problem(where=where, what=what, fix=fix)
    return kind("GlobalSubscriberManager", [problem], consequence="nothing was attached to the model")


GlobalSubscriberManager = SubscriberManager()
"""The manager of this process, as in the original."""


def inspect_activation(activation_name: str, tensor: Tensor) -> Tensor:
    """Have an intermediate tensor, and its gradient, observed by the subscribers; nothing where there are none.

    Args:
        activation_name: What it is called. A name that is used several times in a step is numbered.
        tensor: The tensor.

    Returns:
        The tensor.
    """
    inspected: Tensor = _InspectActivation.apply(
        activation_name, None, GlobalSubscriberManager.get_run_context(), tensor
    )
    return inspected
