"""Where a training is, for those who follow its activations: which step, and which modules there are."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from traindiff.compat.onnxruntime.statistics import called
from traindiff.core.torch_compat.autograd import can_tell_backward, inside_backward, version_of
from traindiff.core.torch_compat.training import live_children_of
from traindiff.errors import ConfigError, Problem

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from traindiff.compat.onnxruntime.manager import Model


_CALLED_BY_THE_ORIGINAL = frozenset({
    *(f"{when}_forward_{what}_apply{own}"
      for when, what in (
          ("pre", "module"), ("pre", "tensor"), ("post", "module"), ("post", "tensor"), ("post", "outmost_module"),
      )
      for own in ("", "_impl")),
    "module_post_forward_impl", "module_pre_backward_impl", "_need_skip_step", "_summarize_activations",
})  # fmt: skip
"""Methods that a subclass of ONNX Runtime's subscribers may override, 1.19."""


class SubscriberBase:
    """Follows the activations of some steps. A subclass does something in `saw`.

    Args:
        start_step: The first step that it follows; None for 0.
        end_step: The step before which it stops; None for none.

    Raises:
        ConfigError: They are no steps, or no step lies between them.
    """

    def __init__(self, start_step: int | None, end_step: int | None) -> None:
        self._start_step = 0 if start_step is None else start_step
        self._end_step = sys.maxsize if end_step is None else end_step
        steps = self._start_step, self._end_step
        if not all(isinstance(step, int) for step in steps) or not 0 <= self._start_step < self._end_step:
            problem = Problem(
                where=f"start_step={start_step!r}, end_step={end_step!r}",
                what="names no step: the first is start_step, the last the one before end_step.",
                fix="Write start_step=10, end_step=20, counted from 0, or leave either out.",
            )
            raise ConfigError(type(self).__name__, [problem])

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Refuse a subclass whose methods nobody would call.

        Raises:
            ConfigError: It overrides methods through which ONNX Runtime calls a subscriber.
        """
        super().__init_subclass__(**arguments)
        problems = [
            Problem(
                where=name,
                what="is a method of ONNX Runtime's subscribers that traindiff does not call.",
                fix="Override saw(tensor, *, name, depth, step, call, forward), called for activations and gradients.",
            )
            for name in vars(cls)
            if name in _CALLED_BY_THE_ORIGINAL and not cls.__module__.startswith("traindiff.")
        ]
        if problems:
            raise ConfigError(f"class {cls.__qualname__}", problems, consequence="the class was not made")

    def follows(self, step: int) -> bool:
        """True if it wants to be told of a step."""
        return self._start_step <= step < self._end_step

    def begin(self, model: Model) -> None:
        """A model is subscribed."""

    def saw(self, tensor: Tensor, *, name: str, depth: int, step: int, call: int, forward: bool) -> None:
        """Called when a module has returned a tensor, or when the gradient of that tensor was computed.

        Args:
            tensor: The tensor or its gradient.
            name: `Linear_1_0th_output`, or as the user called it.
            depth: Depth of the module, 1 for the root; -1 for a tensor that no module returned.
            step: Step of the forward pass.
            call: How often the name was used before in that forward pass.
            forward: True for the tensor itself, False for its gradient.
        """

    def close(self) -> None:
        """Nothing more will come."""


OnGradient = Callable[[Tensor], None]
"""Called with a gradient."""


@dataclass(slots=True)
class GlobalStates:
    """What the original calls the global states.

    Attributes:
        execution_step: Forward passes of the model so far.
        module_index_to_depth: Depth of each module, 1 for the root.
        module_to_module_index: Number of each module: depth first, from 0.
    """

    execution_step: int = 0
    module_index_to_depth: dict[int, int] = field(default_factory=dict)
    module_to_module_index: dict[nn.Module, int] = field(default_factory=dict)


class RuntimeStates:
    """The state of one subscription.

    Attributes:
        global_states: Which step, which modules.
        subscribers: Who follows.
    """

    def __init__(self) -> None:
        self.global_states = GlobalStates()
        self.subscribers: list[SubscriberBase] = []
        self._step = -1
        self._calls: dict[str, int] = {}
        self._taken: set[str] = set()
        self._on_leaves: tuple[int, list[RemovableHandle]] = -1, []
        self._hooked: tuple[weakref.ref[Tensor], tuple[int, int], list[OnGradient]] | None = None

    def number(self, module: nn.Module, depth: int = 1) -> None:
        """Give a model's modules their numbers: each once, depth first."""
        states = self.global_states
        index = len(states.module_to_module_index)
        states.module_to_module_index[module] = index
        states.module_index_to_depth[index] = depth
        for child in live_children_of(module):
            if child not in states.module_to_module_index:
                self.number(child, depth + 1)

    def next_call(self, name: str, step: int) -> int:
        """How often a name was used before in a step; more, where another name is the same with that number."""
        if step != self._step:
            self._step, self._calls, self._taken = step, {}, set()
        call = self._calls.get(name, 0)
        while called(name, call) in self._taken:
            call += 1
        self._calls[name] = call + 1
        self._taken.add(called(name, call))
        return call

    def hook_gradient(self, tensor: Tensor, tell: OnGradient) -> None:
        """Tell of the gradient of a tensor when it comes.

        Of a tensor that a module returns and the module around it, too, the outer one is told first: backward.
        """
        state = version_of(tensor), self.global_states.execution_step
        if self._hooked is not None and self._hooked[0]() is tensor and self._hooked[1] == state:
            self._hooked[2].append(tell)
            return
        told = [tell]

        def hook(gradient: Tensor | None) -> None:
            if gradient is not None:
                for one in reversed(told):
                    one(gradient)

        handle = tensor.register_hook(hook)
        if tensor.is_leaf:  # a parameter, an input: it may outlive the step, and its hook with it
            if self._on_leaves[0] != self.global_states.execution_step:
                self.let_go()
                self._on_leaves = self.global_states.execution_step, []
            self._on_leaves[1].append(handle)
        self._hooked = weakref.ref(tensor), state, told

    def let_go(self) -> None:
        """Remove the hooks on tensors that outlive the graph."""
        for handle in self._on_leaves[1]:
            handle.remove()
        self._on_leaves[1].clear()


def is_traced() -> bool:
    """True if what a model computes now becomes a graph."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def is_recomputed() -> bool:
    """True if what a model computes now was computed before: activation checkpointing repeats it in the backward pass.

    torch 1.13 cannot be asked.
    """
    return can_tell_backward() and inside_backward()


def is_exporting() -> bool:
    """True if ORTModule runs the model only to export it: nothing of it belongs to the training."""
    hooks: Any = sys.modules.get("onnxruntime.training.utils.hooks._subscriber_manager")
    return bool(hooks is not None and hooks.ORT_NO_INCREASE_GLOBAL_STEP[0])
