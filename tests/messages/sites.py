"""Every place in the source where a message for users is made, and which of them a message came from."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import traindiff
from traindiff import errors
from traindiff.errors import Problem, TraindiffError

SOURCE = Path(traindiff.__file__).resolve().parent

_ERRORS = {
    name for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, (TraindiffError, Problem))
}

Line = tuple[Path, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A call that makes a message.

    Attributes:
        file: Where it is.
        lines: First and last line.
        text: The words of the source that it consists of, with `{}` for what is put in; the name of a site, since
            files move.
        built_in: Whether it raises an error of Python's own.
    """

    file: Path
    lines: tuple[int, int]
    text: str
    built_in: bool

    def __str__(self) -> str:
        return f"{self.file.relative_to(SOURCE)}:{self.lines[0]}: {self.text}"

    def is_passed(self, passed: set[Line], golden: str) -> bool:
        """Whether a message came from here; an error of Python's own is known by its words."""
        if self.built_in:
            words = re.escape(self.text).replace(re.escape("{}"), ".*")
            return re.search(words, golden) is not None
        return any((self.file, line) in passed for line in range(self.lines[0], self.lines[1] + 1))


ELSEWHERE = (SOURCE / "observe" / "mindspore", SOURCE / "mindspore.py")
"""Needs MindSpore, which is not installed where these messages are made: see tests/observe/mindspore/test_limits.py."""


def _is_elsewhere(file: Path) -> bool:
    return any(file.is_relative_to(one) for one in ELSEWHERE)


def sites() -> Iterator[Site]:
    """All of them, file by file."""
    for file in sorted(SOURCE.rglob("*.py")):
        if _is_elsewhere(file):
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        own = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name.endswith("Error")}
        makers = _ERRORS | own | {node.name for node in ast.walk(tree) if _makes_a_message(node)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = _name(node.func)
                if name in makers or name == "warn" or (isinstance(node.func, ast.Attribute) and _of_problem(node)):
                    yield _site(file, node, built_in=False)
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and _is_built_in(node.exc):
                yield _site(file, node.exc, built_in=True)


def _own_errors() -> Iterator[type[Exception]]:
    """The errors that a file has beside those of `errors`: where they are caught, their words become part of a message.

    Those of files that need a library which is not installed are left out.
    """
    for file in sorted(SOURCE.rglob("*.py")):
        if _is_elsewhere(file) or not re.search(r"^class \w+Error\(", file.read_text("utf-8"), re.MULTILINE):
            continue
        name = ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts)
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        for kind in vars(module).values():
            is_own = inspect.isclass(kind) and kind.__module__ == name and issubclass(kind, Exception)
            if is_own and not issubclass(kind, TraindiffError):
                yield kind


def _makes_a_message(node: ast.AST) -> bool:
    """Whether it is a function that returns an error or a problem, so that its calls are sites, too."""
    if not isinstance(node, ast.FunctionDef) or node.returns is None:
        return False
    return ast.unparse(node.returns) in _ERRORS


def _is_built_in(call: ast.Call) -> bool:
    """Whether an error of Python's own is made; `SystemExit` says nothing."""
    return hasattr(builtins, _name(call.func)) and _name(call.func) != "SystemExit"


def _of_problem(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "Problem"


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _site(file: Path, call: ast.Call, *, built_in: bool) -> Site:
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    words = [text for argument in arguments if (text := _words(argument))]
    text = words[0] if words and built_in else " | ".join(words) or ast.unparse(call)
    return Site(file=file, lines=(call.lineno, call.end_lineno or call.lineno), text=text, built_in=built_in)


def _words(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return ""


@contextmanager
def passed() -> Iterator[set[Line]]:
    """The lines of the source from which a problem, an error or a warning was made while this was open."""
    lines: set[Line] = set()

    def note() -> None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            file = Path(frame.f_code.co_filename)
            if file.is_relative_to(SOURCE):
                lines.add((file, frame.f_lineno))
            frame = frame.f_back

    def noting(function: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            note()
            return function(*args, **kwargs)

        return noted

    with pytest.MonkeyPatch.context() as patched:
        for kind in (Problem, TraindiffError, *_own_errors()):
            patched.setattr(kind, "__init__", noting(kind.__init__))
        patched.setattr(errors.ConfigError, "__init__", noting(errors.ConfigError.__init__))
        patched.setattr(warnings, "warn", noting(warnings.warn))
        yield lines
