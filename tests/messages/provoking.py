"""Situations in which traindiff says something to its user, and what it says there."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from traindiff.errors import TraindiffError, TraindiffWarning

Provoke = Callable[[Path, pytest.MonkeyPatch], object]
"""Brings a situation about, in an empty directory. What it returns was printed, or written into a recording."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """One thing that a user did or met."""

    title: str
    provoke: Provoke


@dataclass(slots=True)
class Chapter:
    """Situations that belong together, in the order in which the golden file has them."""

    title: str
    situations: list[Situation]

    def situation(self, title: str) -> Callable[[Provoke], Provoke]:
        """Add one."""

        def add(provoke: Provoke) -> Provoke:
            self.situations.append(Situation(title=title, provoke=provoke))
            return provoke

        return add


def said(situation: Situation) -> str:
    """All that traindiff says in a situation, as the user reads it; paths of this machine are taken out."""
    with tempfile.TemporaryDirectory(prefix="messages-") as name, _undone(Path(name)) as patched:
        found: list[str] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                printed = situation.provoke(Path(name), patched)
            except (TraindiffError, OSError) as error:
                printed = None
                found.append(f"{type(error).__name__}:\n{_indented(str(error))}")
        found[:0] = [
            f"{type(one.message).__name__}:\n{_indented(str(one.message))}"
            for one in caught
            if isinstance(one.message, TraindiffWarning)
        ]
        if printed is not None:
            found.append(str(printed))
        if not found:
            raise AssertionError(f"nothing is said in the situation {situation.title!r}")
        return _anywhere("\n".join(found), name)


def _indented(text: str) -> str:
    return textwrap.indent(text, "    ", lambda line: bool(line.strip()))


def _anywhere(text: str, directory: str) -> str:
    """The text as it would be on any machine."""
    text = text.replace(os.path.realpath(directory), "/work").replace(directory, "/work")
    return re.sub(r"0x[0-9a-f]{6,}", "0x...", text)


@contextmanager
def _undone(directory: Path) -> Iterator[pytest.MonkeyPatch]:
    """Work in a directory, and leave no trace in this process."""
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(directory)
        patched.setattr(sys, "path", list(sys.path))
        modules = set(sys.modules)
        try:
            yield patched
        finally:
            for name in set(sys.modules) - modules:
                if str(getattr(sys.modules[name], "__file__", None)).startswith(str(directory)):
                    del sys.modules[name]
