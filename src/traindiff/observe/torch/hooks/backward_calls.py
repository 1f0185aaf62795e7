"""Observe the losses on which `backward` is called. Their sum over a step is what it minimizes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from traindiff.core.observation import ALIGNMENTS, BROADCAST
from traindiff.core.torch_compat.autograd import inside_backward, inside_transform
from traindiff.core.torch_compat.compiling import exclude_from_compilation
from traindiff.observe.common.listeners import Listeners
from traindiff.observe.torch.hooks.context import TapContext
from traindiff.observe.torch.hooks.loss_operators import broadcast_outputs, operators_of, size_of_alignments
from traindiff.observe.torch.hooks.nested import as_tensor

_IN_PYTHON: type[Any] = BackwardCFunction


def may_reach(roots: Iterable[Tensor], parameter_ids: Collection[int]) -> bool:
    """True if a backward pass from `roots` may bring a gradient to one of the parameters.

    Walks through the graph until it finds a parameter, as a rule after a few nodes. A function written in Python
    (reentrant checkpointing) may hide parameters, so it counts as reaching them, except where it `hides_nothing`.

    Args:
        roots: Tensors on which backward is called.
        parameter_ids: Ids of parameters.

    Returns:
        False only if all leaves of the graph are other tensors.
    """
    nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen, reaches_others = set(nodes), False
    for node in nodes:  # which grows; the parameters of the last layer are the nearest
        if isinstance(node, _IN_PYTHON) and not getattr(node, "hides_nothing", False):
            return True
        variable = getattr(node, "variable", None)
        if variable is not None:
            if id(variable) in parameter_ids:
                return True
            reaches_others = True
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return not reaches_others


def reaches(roots: Iterable[Tensor], parameter_ids: Collection[int]) -> bool:
    """True if a parameter is found in the graph of `roots`."""
    return any(id(getattr(node, "variable", None)) in parameter_ids for node in nodes_of(roots))


def nodes_of(roots: Iterable[Tensor]) -> Iterator[Any]:
    """Yield all nodes of the graph of some tensors."""
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def attach(context: TapContext) -> None:
    """Follow calls of `Tensor.backward` and `torch.autograd.backward` that can reach the model's parameters.

    Each scalar root is recorded (phase `loss`), to be summed over the step: gradients are those of this sum, by
    whatever number the training divides its micro-losses. If `loss` is not observed, only progress is kept.
    `torch.autograd.grad` counts as such a call if it is asked for gradients of the model's parameters, and not to
    differentiate them again.

    There is no hook for these calls, so `torch.autograd.backward` (which `Tensor.backward` calls) and
    `torch.autograd.grad` are replaced while at least one tap is attached, and restored when the last one is removed.
    """
    context.undo.enter_context(_listeners.attach(_Listener(context)))


class _Listener:
    """Is told of each backward pass, and tells the taps."""

    def __init__(self, context: TapContext) -> None:
        sink = self._sink = context.sink
        self._context = context
        self.events = context.events
        self._is_concerned = True
        self._reach = sink.guarded("backward_calls", self._follow)
        self._observe_loss = "loss" in context.observe
        self._look_at = sink.guarded("loss", self._begin)
        self._end = sink.guarded("backward_calls", sink.progress.end_backward)
        self._together = context.containment.together

    def begins(self, roots: Sequence[Tensor]) -> bool:
        """Tell of a backward pass of the model that begins; False for that of a model which is trained beside it."""
        self._is_concerned = True
        self._together(self._begins, roots)
        return self._is_concerned

    def ends(self) -> None:
        """Tell of its end."""
        self._together(self._ends)

    def begin(self, roots: Sequence[Tensor]) -> None:
        """Tell of its begin, where it is known to be one of the model."""
        self.events.at_backward()
        self._look_at(roots)

    def end(self) -> None:
        """Note its end."""
        self._end()

    def _begins(self, roots: Sequence[Tensor]) -> None:
        self._reach(roots)
        if self._is_concerned:
            self.begin(roots)

    def _ends(self) -> None:
        self.events.after_backward()
        self._end()

    def asks_for_parameters(self, inputs: frozenset[int]) -> bool:
        """True if gradients are asked of some of the model's parameters, given by id."""
        return not inputs.isdisjoint(self._context.targets.leaf_ids)

    def _follow(self, roots: Sequence[Tensor]) -> None:
        self._is_concerned = may_reach(roots, self._context.targets.leaf_ids)

    def _begin(self, roots: Sequence[Tensor]) -> None:
        progress, chunk = self._sink.progress, self._sink.progress.chunk
        if not (self._observe_loss and progress.observing):
            return
        if not progress.forward_done and not reaches(roots, self._context.targets.leaf_ids):
            return  # compiled code of another model, or of a copy, may look like that of this one
        if chunk is not None and not chunk.is_last:
            return  # this pipeline stage continues from the gradients of the next one
        for root in roots:
            if root.numel() == 1:
                call = progress.next_call("loss", "")
                self._sink.emit(root.reshape(()), phase="loss", path="loss", slot="backward", call=call, merge="sum")
                mark = partial(self._sink.emit, phase="forward", path="", call=call, merge="mean")
                operators = operators_of(root)
                if shape := broadcast_outputs(operators):
                    mark(as_tensor(shape[0]), slot="column" if len(shape) > 1 else "vector", stage=BROADCAST)
                if size := size_of_alignments(operators):
                    mark(as_tensor(size), slot="size", stage=ALIGNMENTS)


_KEPT = Tensor, tuple, list, type(None)
"""Classes that are none of iterators, which is slow to ask."""


def _kept(given: Any) -> Any:
    """An argument of `torch.autograd` that can be looked at before it is handed on: no iterator."""
    return tuple(given) if not isinstance(given, _KEPT) and isinstance(given, Iterator) else given


def _listed(given: Any) -> list[Any]:
    """The tensors and edges of the graph in an argument of `torch.autograd`, which may be one of them."""
    if isinstance(given, (Tensor, GradientEdge)):
        return [given]
    if isinstance(given, Mapping):
        return [*given.values()]
    return [*given] if isinstance(given, Iterable) else []


def _tensors(given: Any) -> list[Tensor]:
    return [given] if isinstance(given, Tensor) else [one for one in _listed(given) if isinstance(one, Tensor)]


_PLACE_OF_INPUTS = 4
"""Of `inputs` among the arguments of `torch.autograd.backward` behind the first one."""


def _followed_backward(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def backward(tensors: Any, *args: Any, **named: Any) -> None:
        tensors = _kept(tensors)
        roots = _tensors(tensors)
        if inside_backward():  # reentrant checkpointing: a part of the backward pass that is running
            for listener in _listeners:
                listener.events.on_inner_backward(roots)
            original(tensors, *args, **named)
            return
        if len(args) > _PLACE_OF_INPUTS:
            *before, given = args[: _PLACE_OF_INPUTS + 1]
            given = _kept(given)
            args = (*before, given, *args[_PLACE_OF_INPUTS + 1 :])
        elif (given := _kept(named.get("inputs"))) is not None:
            named["inputs"] = given
        inputs = None if given is None else _listed(given)
        listeners = [listener for listener in _listeners if listener.begins(roots)]
        try:
            for listener in listeners:
                listener.events.before_backward(roots, inputs)
            original(tensors, *args, **named)
        except BaseException:
            for listener in listeners:
                listener.events.after_backward()
            raise
        for listener in listeners:
            listener.ends()

    return backward


def _followed_grad(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def grad(outputs: Any, inputs: Any, *args: Any, **named: Any) -> Any:
        outputs, inputs = _kept(outputs), _kept(inputs)
        again = named.get("create_graph", args[2] if len(args) > 2 else False)
        if again or inside_backward() or inside_transform() or not _listed(inputs):
            return original(outputs, inputs, *args, **named)
        roots = _tensors(outputs)
        asked = frozenset(map(id, _listed(inputs)))
        listeners = [listener for listener in _listeners if listener.asks_for_parameters(asked)]
        for listener in listeners:
            listener.begin(roots)
        found = original(outputs, inputs, *args, **named)
        for listener in listeners:
            listener.end()
        return found

    return grad


def _install() -> None:
    for name, follow in (("backward", _followed_backward), ("grad", _followed_grad)):
        followed = follow(getattr(torch.autograd, name))
        exclude_from_compilation(followed, callees=False)
        _listeners.replace(torch.autograd, name, followed)
    for function in (inside_backward, _Listener.begin, _Listener.begins, _Listener.end, _Listener.ends):
        exclude_from_compilation(function, callees=True)


_listeners: Listeners[_Listener] = Listeners(_install)
