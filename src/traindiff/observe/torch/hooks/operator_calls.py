"""Where an operator runs: in which call of which module, forward or backward."""

from __future__ import annotations

import linecache
import os
import sys
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import traindiff
from traindiff.core._torch_compat import next_node_number, node_number

_LONGEST_CODE = 120
"""Characters: generated code may be one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLine:
    """A line of source.

    Attributes:
        file: Path, relative to the working directory where it lies below.
        line: Its number, from 1.
        function: Name of the function.
        code: The line itself without indentation, cut after 120 characters; empty where the file cannot be read.
    """

    file: str
    line: int
    function: str
    code: str

    def to_json(self) -> dict[str, str | int]:
        """As JSON values."""
        return {"file": self.file, "line": self.line, "function": self.function, "code": self.code}


_TORCH, _OURS = (Path(one.__file__ or "").absolute().parent for one in (torch, traindiff))
_OF_TORCH, _OF_OURS = f"{_TORCH}{os.sep}", f"{_OURS}{os.sep}"
_OF_THE_DEMO = f"{_OURS / 'run' / 'demo'}{os.sep}"
_ENGINE = str(_TORCH / "autograd" / "graph.py")
_MODULE = str(_TORCH / "nn" / "modules" / "module.py")
_COMPILER = f"{_TORCH / '_dynamo'}{os.sep}"


def called_from(*, in_backward: bool) -> SourceLine | None:
    """The innermost line on this thread's stack that is neither torch's nor traindiff's.

    Args:
        in_backward: Look no further than where a backward pass began: only what is written in Python runs in it, as
            the `backward` of a `torch.autograd.Function` does.

    Raises:
        RuntimeError: Between there and the call of the module is a function that `torch.compile` made.
    """
    found: SourceLine | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if (in_backward and path == _ENGINE) or (found is not None and path == _MODULE and name == "_call_impl"):
            return found
        if path.startswith(_COMPILER) and name == "compile_wrapper":
            raise RuntimeError(
                "a function that is compiled was called where operators are recorded, and compiled code runs no "
                "operators one by one. Record the same training without torch.compile"
            )
        if found is None and not _is_inner(path):
            found = _line(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return found


def _is_inner(path: str) -> bool:
    if path.startswith(_OF_OURS):
        return not path.startswith(_OF_THE_DEMO)
    return path.startswith((_OF_TORCH, "<"))


@cache
def _line(code: CodeType, number: int) -> SourceLine:
    path = code.co_filename
    here = f"{Path.cwd()}{os.sep}"
    return SourceLine(
        file=path.removeprefix(here), line=number, function=code.co_name,
        code=linecache.getline(path, number).strip()[:_LONGEST_CODE],
    )  # fmt: skip


@dataclass(slots=True, kw_only=True)
class ModuleCall:
    """One call of a module whose operators are recorded.

    Attributes:
        path: Canonical path of the module.
        stage: Of what is observed in it.
        call: How often the module had been called before in the micro-step.
        counts: Operators so far, by phase and name.
    """

    path: str
    stage: str
    call: int
    counts: dict[tuple[str, str], int] = field(default_factory=dict)

    def next_number(self, phase: str, name: str) -> int:
        """How many operators of this name the call has had before."""
        number = self.counts.get((phase, name), 0)
        self.counts[phase, name] = number + 1
        return number


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What has made a node of the graph.

    Attributes:
        inside: The call of a module; None outside of those whose operators are recorded.
        operator: Path of the operator.
        source: Where it was called from.
    """

    inside: ModuleCall | None
    operator: str = ""
    source: SourceLine | None = None


class GraphNodes:
    """Which call of a module has made which nodes of autograd's graph, in one step.

    Nodes are told by their numbers, which count up while a forward pass makes them: nothing is attached to the graph,
    and nothing of it is kept. What lies between two noted numbers (a copy into a slice makes its node after it ran)
    belongs to the first.
    """

    def __init__(self) -> None:
        self._first: list[int] = []
        self._made: list[Made] = []

    def __bool__(self) -> bool:
        return bool(self._made)

    def note(self, made: Made) -> None:
        """An operator is running, whose node autograd has made just now, if it makes one."""
        number = next_node_number() - 1
        if not self._first or number > self._first[-1]:
            self._first.append(number)
            self._made.append(made)

    def outside(self) -> None:
        """The nodes from here on are made by what is not recorded."""
        number = next_node_number()
        if self._first and number > self._first[-1]:
            self._first.append(number)
            self._made.append(Made(inside=None))

    def find(self, node: Any) -> Made | None:
        """What has made a node; None for what is not recorded: other nodes, and those that accumulate gradients."""
        number = node_number(node)
        place = bisect_right(self._first, number) - 1
        if place < 0 or number >= 1 << 63:
            return None
        made = self._made[place]
        return made if made.inside is not None else None

    def clear(self) -> None:
        """The step has ended."""
        self._first.clear()
        self._made.clear()
