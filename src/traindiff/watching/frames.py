"""Frames: what one call of a module took and gave, in the forward or the backward pass, or one parameter in a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from traindiff.site import ROOT, printable
from traindiff.watching.reading import Reading

Part = Literal["forward", "backward", "gradients", "optimizer"]

_HEADINGS = {"gradients": "gradient"}

PARTS: tuple[Part, ...] = ("forward", "backward", "gradients", "optimizer")
"""The parts of a step, in the order in which they run."""

HEAD = f"{'abs min':8} {'abs max':8} metadata"
_INDENT = " " * 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One tensor of a frame, or what stands in its place.

    Attributes:
        name: `weight`, `input[0]`, `output`, `grad output`.
        reading: What was read; None for what is no tensor.
        note: What is written in place of numbers then: `None`, `not a tensor`.
    """

    name: str
    reading: Reading | None = None
    note: str = ""

    @property
    def is_given(self) -> bool:
        """Whether this is an input."""
        return self.name.startswith("input")

    @property
    def is_output(self) -> bool:
        """Whether this is an output."""
        return self.name.startswith("output")

    def __str__(self) -> str:
        """As printed: `2.17e-07 4.50e+00 weight`."""
        if self.reading is None:
            return f"{self.note:>17} {self.name}"
        extent = self.reading.extent
        if extent is None:
            return f"{'not read':>17} {self.name}" if self.reading.reason else f"{'not there yet':>17} {self.name}"
        if not extent.count:
            return f"{'empty':>17} {self.name}"
        return f"{extent.smallest:8.2e} {extent.largest:8.2e} {self.name}"


@dataclass(slots=True, kw_only=True, eq=False)
class Frame:
    """One call of a module, or one parameter.

    Attributes:
        part: Of the step.
        path: Canonical path.
        kind: Class of the module; `Parameter`.
        lines: Its tensors; more may come.
        note: What is special about the call; empty as a rule.
    """

    part: Part
    path: str
    kind: str
    lines: list[Line] = field(default_factory=list)
    note: str = ""

    def __str__(self) -> str:
        """As printed: the path and the class, and a line for each tensor."""
        title = f"{_INDENT}{printable(self.path or ROOT)} {self.kind}"
        return "\n".join([f"{title} ({self.note})" if self.note else title, *map(str, self.lines)])


def printed(frames: Sequence[Frame], part: Part) -> Iterator[str]:
    """Frames of one part, under their heading."""
    if frames:
        yield f"Last {len(frames)} {_HEADINGS.get(part, part)} frames:"
        yield HEAD
        yield from map(str, frames)
