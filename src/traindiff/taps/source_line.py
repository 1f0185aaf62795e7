"""The line of the user's source from which an operator was called."""

from __future__ import annotations

import linecache
import os
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import torch

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


_TORCH, _OURS = Path(torch.__file__).absolute().parent, Path(__file__).absolute().parents[1]
_OF_TORCH, _OF_OURS = f"{_TORCH}{os.sep}", f"{_OURS}{os.sep}"
_OF_THE_DEMO = f"{_OURS / 'demo'}{os.sep}"
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
