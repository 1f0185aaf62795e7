"""The tensors that an operator is given, and those that it makes or writes to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from traindiff.core._torch_compat import hide_dispatch_mode
from traindiff.observe.torch.hooks.nested import tensors

_COMPUTE_OTHERWISE = ("ProdBackward", "MaskedFillBackward1")
"""How the names begin of nodes that take another formula, which rounds otherwise, while any mode is on.

Of all operators that torch lists for its own tests (`op_db`), these are the ones.
"""

WITHOUT_MODE = "its backward pass computes other bits while it is looked into"


class WithoutMode:
    """Has a mode off while nodes run that would compute otherwise under it.

    Args:
        mode: The mode.
    """

    def __init__(self, mode: TorchDispatchMode) -> None:
        self._mode = mode
        self._handles: list[Any] = []

    def hook(self, roots: Sequence[Tensor]) -> list[Any]:
        """Follow the graph of a backward pass that is about to run; gives the nodes that would compute otherwise."""
        found = [node for node in _nodes(roots) if node.name().startswith(_COMPUTE_OTHERWISE)]
        for node in found:
            self._handles += self._hooked(node)
        return found

    def unhook(self) -> None:
        """The backward pass has ended."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hooked(self, node: Any) -> tuple[Any, Any]:
        hidden = ExitStack()

        def before(_: Any) -> None:
            hidden.callback(hide_dispatch_mode(self._mode))

        def after(_: Any, __: Any) -> None:
            hidden.close()

        return node.register_prehook(before), node.register_hook(after)


def _nodes(roots: Sequence[Tensor]) -> Iterator[Any]:
    """All nodes of a graph."""
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


Slots = list[tuple[str, Tensor]]
"""Tensors with their slots."""

_LEAVE_MEMORY_AS_IT_IS = frozenset(
    {
        "empty", "empty_like", "empty_permuted", "empty_quantized", "empty_strided", "new_empty", "new_empty_strided",
        "resize_",
    }
)  # fmt: skip
"""Operators whose output holds whatever was in memory: nothing that two runs could have in common."""

_OVERWRITE = frozenset(
    {
        "bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_", "random_",
        "uniform_", "zero_",
    }
)  # fmt: skip
"""Operators that write to their first argument without having read it."""

_WORKSPACES: Mapping[str, frozenset[int]] = {
    "mkldnn_rnn_layer": frozenset({3}), "_cudnn_rnn": frozenset({3, 4}), "cudnn_batch_norm": frozenset({3}),
    "_cudnn_init_dropout_state": frozenset({0}),
}  # fmt: skip
"""Outputs that only the operator's own backward pass can read."""


class Schema(NamedTuple):
    """What is known of an operator.

    Attributes:
        name: Namespace and name, without the overload: `aten.addmm`.
        arguments: Names of its arguments, in order; none where it has no schema.
        written: Names of those that it writes to.
        unread: Names of those that it writes to and does not read.
        undefined: Whether its output holds whatever was in memory.
        workspaces: Which of its outputs only its own backward pass can read.
    """

    name: str
    arguments: tuple[str, ...]
    written: frozenset[str]
    unread: frozenset[str]
    undefined: bool
    workspaces: frozenset[int]


@cache
def schema_of(operator: Any) -> Schema:
    """What is known of an operator that was dispatched."""
    namespace, _, rest = str(operator).partition(".")
    short = rest.partition(".")[0]
    name = f"{namespace}.{short}" if short else namespace
    schema = getattr(operator, "_schema", None)
    arguments = () if schema is None else tuple(schema.arguments)
    written = [one for one in arguments if one.alias_info is not None and one.alias_info.is_write]
    unread = {one.name for one in written if one.is_out or (short in _OVERWRITE and one.name == arguments[0].name)}
    return Schema(
        name=name,
        arguments=tuple(one.name for one in arguments),
        written=frozenset(one.name for one in written),
        unread=frozenset(unread),
        undefined=short in _LEAVE_MEMORY_AS_IT_IS,
        workspaces=_WORKSPACES.get(short, frozenset()),
    )


def inputs_of(schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Slots:
    """What an operator reads, e.g. `input[0]`, `input[1][2]` (of a list), `input.mask`."""
    found: Slots = []
    for place, value in enumerate(args):
        if _name(schema, place) not in schema.unread:
            found += _within(value, f"input[{place}]")
    for name, value in kwargs.items():
        if name not in schema.unread:
            found += _within(value, f"input.{name}")
    return found


def outputs_of(schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> Slots:
    """What an operator returned, and what it wrote to beside that, e.g. `output[0]`, `output.running_mean`."""
    returned = list(tensors(output, "output"))
    if isinstance(output, (list, tuple)) and schema.workspaces:
        hidden = {id(output[place]) for place in schema.workspaces if place < len(output)}
        returned = [(slot, tensor) for slot, tensor in returned if id(tensor) not in hidden]
    known = {id(tensor) for _, tensor in returned}
    named = [*((_name(schema, place), value) for place, value in enumerate(args)), *kwargs.items()]
    written = (one for name, value in named if name in schema.written for one in _within(value, f"output.{name}"))
    return [*returned, *((slot, tensor) for slot, tensor in written if id(tensor) not in known)]


def settings_of(schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """The arguments of an operator that are no tensors, as text by name, e.g. `{"eps": "1e-05"}`."""
    named = [*((_name(schema, place), value) for place, value in enumerate(args)), *kwargs.items()]
    return {name: text for name, value in named if value is not None and (text := _text(value))}


def _name(schema: Schema, place: int) -> str:
    return schema.arguments[place] if place < len(schema.arguments) else f"argument {place}"


def _within(value: Any, slot: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield slot, value
    else:
        yield from tensors(value, slot)


_LONGEST_TEXT = 80


def _text(value: Any) -> str:
    """An argument as text; empty for what has tensors in it, or says nothing that two processes have in common."""
    if isinstance(value, (bool, int, float, complex, str)):
        return str(value)[:_LONGEST_TEXT]
    if isinstance(value, (list, tuple)):
        if any(True for _ in tensors(value, "")) or any(one is None for one in value):
            return ""
        return f"[{', '.join(map(str, value))}]"[:_LONGEST_TEXT]
    return str(value) if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)) else ""


class UndefinedMemory:
    """Follows, from operator to operator, which storages hold nothing that two runs could have in common.

    A storage that operators write to part by part counts as undefined until as much was written as it holds.
    """

    def __init__(self) -> None:
        self._unwritten: dict[int, float] = {}  # bytes to which nothing was written, by address

    def __bool__(self) -> bool:
        return bool(self._unwritten)

    def note(self, schema: Schema, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """An operator has run."""
        given = {_address(tensor) for _, tensor in tensors((args, dict(kwargs)), "")}
        if schema.undefined:
            for _, tensor in tensors(output, ""):
                self._unwritten[_address(tensor)] = tensor.untyped_storage().nbytes()
            return
        for name, value in (*zip(schema.arguments, args, strict=False), *kwargs.items()):
            for _, tensor in tensors(value, "") if name in schema.written else ():
                self._wrote(tensor)
        for _, tensor in tensors(output, ""):
            if _address(tensor) not in given:  # neither a view nor written in place: new, whatever was there before
                self._unwritten.pop(_address(tensor), None)
        if schema.workspaces and isinstance(output, (list, tuple)):
            for place in schema.workspaces:
                if place < len(output) and isinstance(output[place], Tensor):
                    self._unwritten[_address(output[place])] = float("inf")

    def is_undefined(self, tensor: Tensor) -> bool:
        """Whether a tensor has elements to which nothing was written, as far as is known."""
        return bool(self._unwritten) and tensor.numel() > 0 and _address(tensor) in self._unwritten

    def clear(self) -> None:
        """What was in memory is gone."""
        self._unwritten.clear()

    def _wrote(self, tensor: Tensor) -> None:
        address = _address(tensor)
        if address in self._unwritten:
            self._unwritten[address] -= tensor.numel() * tensor.element_size()
            if self._unwritten[address] <= 0:
                del self._unwritten[address]


def _address(tensor: Tensor) -> int:
    """Where a tensor's storage is; that of the object, for a tensor that has none."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (NotImplementedError, RuntimeError):
        return id(tensor)
