"""One call of an operator: its place in the training, the tensors that it reads and writes, and its settings."""

from __future__ import annotations

import linecache
import os
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import traindiff
from traindiff.core.torch_compat.autograd import next_node_number, node_number
from traindiff.core.torch_compat.compiling import (
    BACKWARD_FILE,
    COMPILER_FILES,
    INDUCTOR_FILES,
    MODULE_CALL,
    TORCH_FILES,
)
from traindiff.core.torch_compat.operators import operator_schema
from traindiff.observe.torch.hooks.nested import tensors

_LONGEST_CODE = 120
"""Characters: generated code may be one line."""


SourceLine = dict[str, str | int]
"""A line of source, as JSON.

`file` is relative if the file is below the working directory; `line` counts from 1; `function` is the name of the
function; `code` is the line itself without indentation, cut after 120 characters, and empty if the file cannot be read.
"""

_OURS = Path(traindiff.__file__ or "").absolute().parent
_OF_TORCH, _OF_OURS = f"{TORCH_FILES}{os.sep}", f"{_OURS}{os.sep}"
_OF_THE_DEMO = f"{_OURS / 'run' / 'demo'}{os.sep}"


_COMPILED = (
    "a function that is compiled was called where operators are recorded, and compiled code runs no operators one by "
    "one. Record the same training without torch.compile"
)


def called_from(*, in_backward: bool, through_compiled: bool = False) -> SourceLine | None:
    """The innermost line on this thread's stack that is neither torch's, nor torchao's, nor traindiff's.

    Args:
        in_backward: Look no further than the start of the backward pass: Python code runs in it only in the
            `backward` of a `torch.autograd.Function`, and the like.
        through_compiled: Look for the line that calls what is compiled, if there is such a function on the way.

    Raises:
        RuntimeError: There is a function that `torch.compile` made on the way to the call of the module, and
            `through_compiled` is False.
    """
    found: SourceLine | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if (in_backward and path == BACKWARD_FILE) or (found is not None and (path, name) == MODULE_CALL):
            return found
        if path.startswith(COMPILER_FILES) and name == "compile_wrapper":
            if not through_compiled:
                raise RuntimeError(_COMPILED)
            found = None
        elif path.startswith(INDUCTOR_FILES):
            found = None  # it was a line of generated code
        if found is None and not _is_inner(path):
            found = _line(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return found


def _is_inner(path: str) -> bool:
    if path.startswith(_OF_OURS):
        return not path.startswith(_OF_THE_DEMO)
    return path.startswith((_OF_TORCH, "<")) or _is_of_torchao(path)


def _is_of_torchao(path: str) -> bool:
    """True for files of torchao, whose layers and tensors stand in place of torch's. It is not imported here."""
    file = getattr(sys.modules.get("torchao"), "__file__", None)
    return file is not None and path.startswith(f"{Path(file).parent}{os.sep}")


@cache
def _line(code: CodeType, number: int) -> SourceLine:
    path = code.co_filename
    here = f"{Path.cwd()}{os.sep}"
    text = linecache.getline(path, number).strip()[:_LONGEST_CODE]
    return {"file": path.removeprefix(here), "line": number, "function": code.co_name, "code": text}


@dataclass(slots=True, kw_only=True)
class ModuleCall:
    """One call of a module whose operators are recorded.

    Attributes:
        path: Canonical path of the module.
        stage: The stage under which its operators are recorded.
        call: The number of earlier calls of the module in the micro-step.
        counts: Operators so far, by phase and name.
    """

    path: str
    stage: str
    call: int
    counts: dict[tuple[str, str], int] = field(default_factory=dict)

    def next_number(self, phase: str, name: str) -> int:
        """The number of earlier operators of this name in the call."""
        number = self.counts.get((phase, name), 0)
        self.counts[phase, name] = number + 1
        return number


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """The maker of a node of the graph.

    Attributes:
        inside: The call of a module whose operators are recorded.
        operator: Path of the operator.
        source: The line that called it.
    """

    inside: ModuleCall
    operator: str
    source: SourceLine | None


class GraphNodes:
    """Finds the call of a module that has made a node of autograd's graph, in one step.

    Nodes are told by their numbers, which count up while a forward pass makes them: nothing is attached to the graph,
    and nothing of it is kept. Nodes between two noted numbers (a copy into a slice makes its node after it ran) belong
    to the first.
    """

    def __init__(self) -> None:
        self._first: list[int] = []
        self._made: list[Made | None] = []  # None outside of the modules whose operators are recorded

    def __bool__(self) -> bool:
        return bool(self._made)

    def note(self, made: Made) -> None:
        """Note that an operator is running, whose node autograd has just made, if it makes one."""
        number = next_node_number() - 1
        if not self._first or number > self._first[-1]:
            self._first.append(number)
            self._made.append(made)

    def outside(self) -> None:
        """Note that the next nodes are made outside of the modules whose operators are recorded."""
        number = next_node_number()
        if self._first and number > self._first[-1]:
            self._first.append(number)
            self._made.append(None)

    def find(self, node: Any) -> Made | None:
        """The maker of a node; None for nodes of other modules, and for those that accumulate gradients."""
        number = node_number(node)
        place = bisect_right(self._first, number) - 1
        return None if place < 0 or number >= 1 << 63 else self._made[place]

    def clear(self) -> None:
        """Forget all nodes: the step has ended."""
        self._first.clear()
        self._made.clear()


Slots = list[tuple[str, Tensor]]
"""Tensors with their slots."""

_LEAVE_MEMORY_AS_IT_IS = frozenset(
    {
        "empty", "empty_like", "empty_permuted", "empty_quantized", "empty_strided", "new_empty", "new_empty_strided",
        "resize_",
    }
)  # fmt: skip
"""Operators whose output is uninitialized memory, which two runs cannot have in common."""

_OVERWRITE = frozenset(
    {
        "bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_", "random_",
        "uniform_", "zero_",
    }
)  # fmt: skip
"""Operators that overwrite their first argument without reading it."""

_WORKSPACES: Mapping[str, frozenset[int]] = {
    "mkldnn_rnn_layer": frozenset({3}), "_cudnn_rnn": frozenset({3, 4}), "cudnn_batch_norm": frozenset({3}),
    "_cudnn_init_dropout_state": frozenset({0}),
}  # fmt: skip
"""Outputs that only the operator's own backward pass can read."""


class Schema(NamedTuple):
    """The properties of an operator that matter for observing it.

    Attributes:
        name: Namespace and name, without the overload: `aten.addmm`.
        arguments: Names of its arguments, in order; none if it has no schema.
        written: Names of the arguments that it writes to.
        unread: Names of the arguments that it writes to and does not read.
        undefined: Its output is uninitialized memory.
        workspaces: Positions of outputs that only its own backward pass can read.
    """

    name: str
    arguments: tuple[str, ...]
    written: frozenset[str]
    unread: frozenset[str]
    undefined: bool
    workspaces: frozenset[int]


@cache
def schema_of(operator: Any) -> Schema:
    """The properties of an operator that was dispatched."""
    namespace, _, rest = str(operator).partition(".")
    short = rest.partition(".")[0]
    name = f"{namespace}.{short}" if short else namespace
    schema = operator_schema(operator)
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
    """The tensors that an operator reads, e.g. `input[0]`, `input[1][2]` (of a list), `input.mask`."""
    found: Slots = []
    for place, value in enumerate(args):
        if _name(schema, place) not in schema.unread:
            found += _within(value, f"input[{place}]")
    for name, value in kwargs.items():
        if name not in schema.unread:
            found += _within(value, f"input.{name}")
    return found


def outputs_of(schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> Slots:
    """The tensors that an operator returned, and others that it wrote to, e.g. `output[0]`, `output.running_mean`."""
    returned = list(tensors(output, "output"))
    if isinstance(output, (list, tuple)) and schema.workspaces:
        hidden = {id(output[place]) for place in schema.workspaces if place < len(output)}
        returned = [(slot, tensor) for slot, tensor in returned if id(tensor) not in hidden]
    known = {id(tensor) for _, tensor in returned}
    named = [*((_name(schema, place), value) for place, value in enumerate(args)), *kwargs.items()]
    written = (one for name, value in named if name in schema.written for one in _within(value, f"output.{name}"))
    return [*returned, *((slot, tensor) for slot, tensor in written if id(tensor) not in known)]


def settings_of(schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """The arguments of an operator other than tensors, as text by name, e.g. `{"eps": "1e-05"}`."""
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
    """An argument as text; empty if it holds tensors, or has no text that two processes would have in common."""
    if isinstance(value, (bool, int, float, complex, str)):
        return str(value)[:_LONGEST_TEXT]
    if isinstance(value, (list, tuple)):
        if any(True for _ in tensors(value, "")) or any(one is None for one in value):
            return ""
        return f"[{', '.join(map(str, value))}]"[:_LONGEST_TEXT]
    return str(value) if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)) else ""


class UndefinedMemory:
    """Follows, from operator to operator, which storages are uninitialized, so that two runs cannot be compared there.

    A storage that operators write part by part counts as uninitialized until as much was written as it holds.
    """

    def __init__(self) -> None:
        self._unwritten: dict[int, float] = {}  # number of bytes that were never written, by address

    def __bool__(self) -> bool:
        return bool(self._unwritten)

    def note(self, schema: Schema, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """Note what an operator that has run left undefined, and what it wrote."""
        given = {_address(tensor) for _, tensor in tensors((args, dict(kwargs)), "")}
        if schema.undefined:
            for _, tensor in tensors(output, ""):
                self._unwritten[_address(tensor)] = tensor.untyped_storage().nbytes()
            return
        for name, value in (*zip(schema.arguments, args, strict=False), *kwargs.items()):
            for _, tensor in tensors(value, "") if name in schema.written else ():
                self._wrote(tensor)
        for _, tensor in tensors(output, ""):
            if _address(tensor) not in given:  # neither a view nor written in place: it is new, and so is what it holds
                self._unwritten.pop(_address(tensor), None)
        if schema.workspaces and isinstance(output, (list, tuple)):
            for place in schema.workspaces:
                if place < len(output) and isinstance(output[place], Tensor):
                    self._unwritten[_address(output[place])] = float("inf")

    def is_undefined(self, tensor: Tensor) -> bool:
        """True if a tensor may have elements that were never written."""
        return bool(self._unwritten) and tensor.numel() > 0 and _address(tensor) in self._unwritten

    def clear(self) -> None:
        """Forget everything: the memory may be reused."""
        self._unwritten.clear()

    def _wrote(self, tensor: Tensor) -> None:
        address = _address(tensor)
        if address in self._unwritten:
            self._unwritten[address] -= tensor.numel() * tensor.element_size()
            if self._unwritten[address] <= 0:
                del self._unwritten[address]


def _address(tensor: Tensor) -> int:
    """The address of a tensor's storage; a number of its own for a tensor without one."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (NotImplementedError, RuntimeError):
        return id(tensor)
