"""Private names of torch's autograd: its engine, the nodes of its graph, and what they save."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint


def inside_backward() -> bool:
    """True while the autograd engine runs on this thread.

    There is no public way to ask; torch's own checkpointing and FSDP ask the same function.
    """
    return torch._C._current_graph_task_id() != -1


def can_tell_backward() -> bool:
    """True if this torch has what `inside_backward` asks; torch 1.13, which ONNX Runtime may come with, does not."""
    return hasattr(torch._C, "_current_graph_task_id")


def running_node() -> Any:
    """The graph node whose backward pass runs on this thread; None if no backward pass runs.

    There is no public way to ask; torch's own anomaly mode and its tools for debugging do it like this.
    """
    return torch._C._current_autograd_node()


_CHECKPOINTS = ("checkpoint", "check_point", "ckpt", "recomput", "remat", "offload")
"""Words in the names of functions that compute again what they have not kept."""


def inside_own_backward() -> bool:
    """True if a function of autograd calls something in its own backward pass, and is no activation checkpointing.

    Adjoints of solvers and reversible layers do: they call modules with other inputs than the forward pass, or with
    rounded ones. There is no public way to ask: torch's checkpointing is known by its file, and others (those of
    DeepSpeed, Megatron, torchgpipe) by the name of their function.
    """
    apply, engine = torch.autograd.function.BackwardCFunction.apply, torch.autograd.graph._engine_run_backward
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not engine.__code__:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return False
        if frame.f_code is apply.__code__:
            name = frame.f_locals["self"]._forward_cls.__qualname__.lower()
            return not any(word in name for word in _CHECKPOINTS)
        frame = frame.f_back
    return False


def node_number(node: Any) -> int:
    """The number of a node of the graph. A thread numbers nodes in the order in which its forward pass makes them."""
    return int(node._sequence_nr())


def next_node_number() -> int:
    """The number of the node that this thread makes next. Below autograd, the node of an operator exists already."""
    return int(torch._C._autograd._get_sequence_nr())


def result_shape(node: Any, number: int) -> tuple[int, ...]:
    """The shape of one result of an operation, given the operation's node and the number of the result."""
    return tuple(node._input_metadata[number].shape)


def num_results(node: Any) -> int:
    """The number of results of an operation, given the operation's node."""
    return len(node._input_metadata)


def hooks_on_node(node: Any, *, before: bool) -> dict[int, Callable[..., Any]]:
    """The hooks on a node of the graph that run before it or after it, by the numbers of their handles.

    Nothing lists them. But all that were registered in Python lie in one dict, and the handle of each refers to it.
    """
    handle = (node.register_prehook if before else node.register_hook)(_no_hook)
    found: dict[int, Callable[..., Any]] = handle.hooks_dict_ref()
    handle.remove()
    return found


def _no_hook(*_: Any) -> None:
    """Takes the place of a hook."""


def saved(node: Any, name: str, *default: Any) -> Any:
    """What an operation saved for its backward pass, given the operation's node; or the default, if there is one."""
    return getattr(node, f"_saved_{name}", *default)


def saved_dims(node: Any) -> tuple[int, ...]:
    """The dims that a transposition or permutation exchanges; torch keeps negative ones as unsigned numbers."""
    dims = (node._saved_dim0, node._saved_dim1) if hasattr(node, "_saved_dim0") else node._saved_dims
    return tuple(map(_signed, dims))


def saved_dim(node: Any) -> int:
    """The dim along which an operation that has one took a part, given the operation's node."""
    return int(_signed(node._saved_dim)) % len(node._saved_self_sym_sizes)


def saved_index(node: Any) -> int:
    """The index that a selection took."""
    return int(_signed(node._saved_index)) % int(node._saved_self_sym_sizes[saved_dim(node)])


def _signed(number: int) -> int:
    """A negative number that torch keeps as an unsigned one."""
    return number - (1 << 64) if number >= 1 << 63 else number


def version_of(tensor: torch.Tensor) -> int:
    """A counter of the writes to a tensor; -1 for inference tensors, which have none. There is no public counter."""
    return -1 if tensor.is_inference() else tensor._version


def keeps_saved_tensors_elsewhere() -> bool:
    """True if the forward pass that runs does not keep what its backward pass needs, but hands it to hooks.

    Activation checkpointing and offloading do. There is no public way to ask; older torch releases have none.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is not None and top(True) is not None  # noqa: FBT003  that hooks are ignored while torch traces


saved_tensors_module: Any = torch._C._autograd
"""Has the functions that switch hooks on saved tensors on and off, which have no public names."""

SAVED_TENSORS_PUSH, SAVED_TENSORS_POP = "_push_saved_tensors_default_hooks", "_pop_saved_tensors_default_hooks"


def storage_key(tensor: torch.Tensor) -> int:
    """A number that tensors share if they share a storage. `data_ptr`, the public name, is 0 for empty storages."""
    return int(tensor.untyped_storage()._cdata)


def is_view_of_another(tensor: torch.Tensor) -> bool:
    """True if autograd knows the tensor as a view, so that to write to it writes to another tensor, too."""
    return tensor._is_view()


def inside_transform() -> bool:
    """True inside a transform of `torch.func` (vmap, grad, jacrev, ...), whose tensors stand for others.

    There is no public way to ask.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None
