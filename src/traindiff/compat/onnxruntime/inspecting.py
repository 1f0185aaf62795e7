"""Operators through which subscribers see tensors inside of a graph that ORTModule has exported.

ORTModule runs a model once to export it, and from then on the exported graph: hooks of modules run no more. An
`autograd.Function` that was called while exporting becomes an operator of the graph (`PythonOp`), which calls it in
every step. `infer_shape` and `alias_input` are what ONNX Runtime asks such a function for.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from traindiff.compat.onnxruntime.run_context import RuntimeStates, is_exporting, is_recomputed, is_traced
from traindiff.core.torch_compat.compiling import not_traced

Tell = Callable[[Tensor, int, str, int], Any]
"""A tensor, the depth of its module, its name, and its step."""

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Characters that end a line, or that UTF-8 lacks."""


class _Observed(torch.autograd.Function):
    """The identity, which tells subscribers of the tensor and of its gradient."""

    @staticmethod
    def forward(
        ctx: Any, name: str, module_index: int | None, context: RuntimeStates, tensor: Tensor, after: Tell, before: Tell
    ) -> Tensor:
        states = context.global_states
        ctx.about = (
            -1 if module_index is None else states.module_index_to_depth[module_index],
            name,
            states.execution_step,
        )
        ctx.before = before
        if not is_exporting():
            after(tensor.detach(), *ctx.about)
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
        if gradient is not None and not is_exporting():
            ctx.before(gradient.detach(), *ctx.about)
        return None, None, None, None if gradient is None else gradient.detach(), None, None

    @staticmethod
    def infer_shape(node: Any, shapes: list[Any], dtypes: list[Any]) -> tuple[list[Any], list[Any]]:  # noqa: ARG004
        """Shape and dtype of the output are those of the input."""
        return shapes, dtypes

    @staticmethod
    def alias_input(node: str) -> tuple[list[int], list[int]]:  # noqa: ARG004
        """The output shares memory with the fourth input, and its gradient with that of the output."""
        return [3], [-1, -1, -1, 0, -1, -1]


class _EndOfForward(torch.autograd.Function):
    """The identity on all outputs of a model, which ends the forward pass of a step."""

    @staticmethod
    def forward(ctx: Any, context: RuntimeStates, *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: ARG004
        if not is_exporting():
            context.global_states.execution_step += 1
        return tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:  # noqa: ARG004
        return None, *gradients

    @staticmethod
    def infer_shape(node: Any, shapes: list[Any], dtypes: list[Any]) -> tuple[list[Any], list[Any]]:  # noqa: ARG004
        """Shapes and dtypes of the outputs are those of the inputs."""
        return shapes, dtypes

    @staticmethod
    def alias_input(node: str) -> tuple[list[int], list[int]]:
        """Each output shares memory with its input, each gradient with that of its output."""
        import onnx

        found = onnx.NodeProto()
        found.ParseFromString(node)
        forward = [1 + number for number in range(len(found.output) - 1)]
        backward = [-1, *range(len(found.input))]
        return forward, backward


class _InspectActivation:
    """An intermediate tensor that subscribers are to see, under the original's name."""

    @staticmethod
    def apply(
        activation_name: str,
        module_idx: int | None,
        run_ctx: RuntimeStates,
        input_tensor: Any,
        module_post_forward: Tell | None = None,
        module_pre_backward: Tell | None = None,
    ) -> Any:
        """Have a tensor, and its gradient, observed.

        Args:
            activation_name: What it is called. A name that is used several times in a step is numbered.
            module_idx: None; the number of a module gives its depth.
            run_ctx: Of `GlobalSubscriberManager.get_run_context()`.
            input_tensor: The tensor; anything else is passed on.
            module_post_forward: Called with the tensor in place of the subscribers.
            module_pre_backward: Called with its gradient in place of the subscribers.

        Returns:
            The tensor.
        """
        if not isinstance(input_tensor, Tensor):
            return input_tensor
        telling = Telling(run_ctx, after=module_post_forward, before=module_pre_backward)
        return observed(_one_line(activation_name), module_idx, run_ctx, input_tensor, telling)


class Telling:
    """Tells all subscribers of one tensor. It is told of a forward pass, then of the gradients of it.

    `after` is called with the tensor in place of the subscribers, and `before` with its gradient.
    """

    def __init__(self, context: RuntimeStates, *, after: Tell | None = None, before: Tell | None = None) -> None:
        self._context = context
        self._after = after
        self._before = before
        self._step = -1
        self._calls: list[int] = []
        self._to_repeat: list[int] = []

    def output(self, tensor: Tensor, depth: int, name: str, step: int) -> int:
        """A tensor was computed; returns how often its name was used before in its step."""
        if self._after is not None:
            self._after(tensor, depth, name, step)
            return 0
        call = self._context.next_call(name, step)
        if step != self._step:
            self._step, self._calls, self._to_repeat = step, [], []
        self._calls.append(call)
        self._tell(tensor, depth, name, step, call=call, forward=True)
        return call

    def gradient(self, tensor: Tensor, depth: int, name: str, step: int, call: int | None = None) -> None:
        """The gradient of a call came back; None for the latest one that has had none."""
        if self._before is not None:
            self._before(tensor, depth, name, step)
            return
        if call is None:
            call = self._calls.pop() if len(self._calls) > 1 else (self._calls or [0])[0]
        self._tell(tensor, depth, name, step, call=call, forward=False)

    def will_be_repeated(self, call: int) -> None:
        """No gradient comes to a call itself: checkpointing repeats it in the backward pass, if there is one."""
        self._to_repeat.append(call)

    def repeated(self) -> tuple[int, int] | None:
        """Step and call of what is computed again: the latest that waits for a gradient; None if none does."""
        return (self._step, self._to_repeat.pop()) if self._to_repeat else None

    def _tell(self, tensor: Tensor, depth: int, name: str, step: int, *, call: int, forward: bool) -> None:
        for one in self._context.subscribers:
            if one.follows(step):
                one.saw(tensor, name=name, depth=depth, step=step, call=call, forward=forward)


@not_traced
def observed(name: str, module_index: int | None, context: RuntimeStates, tensor: Tensor, telling: Telling) -> Tensor:
    """Tell of a tensor now, and of its gradient when it comes: in a graph that is exported by an operator of it.

    Anywhere else no node is put into the graph: the gradient is seen by a hook. What checkpointing computes again was
    told of the first time; its gradient comes to it where the first time no graph was built.
    """
    if is_traced():
        inside: Tensor = _Observed.apply(  # type: ignore[no-untyped-call]
            name, module_index, context, tensor, telling.output, telling.gradient
        )
        return inside
    if is_exporting():
        return tensor
    states = context.global_states
    depth, step = -1 if module_index is None else states.module_index_to_depth[module_index], states.execution_step
    if is_recomputed():
        first = telling.repeated()
        if first is None:
            return tensor
        step, call = first
    else:
        call = telling.output(tensor.detach(), depth, name, step)
    if tensor.requires_grad:
        context.hook_gradient(tensor, lambda gradient: telling.gradient(gradient.detach(), depth, name, step, call))
    elif not torch.is_grad_enabled():
        telling.will_be_repeated(call)
    return tensor


def _one_line(name: object) -> str:
    """A name that a line of a file can hold."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), str(name))


def end_of_forward(context: RuntimeStates, tensors: list[Tensor]) -> list[Tensor]:
    """Put what ends the forward pass of a step into a graph that is exported."""
    return list(_EndOfForward.apply(context, *tensors))  # type: ignore[no-untyped-call]
