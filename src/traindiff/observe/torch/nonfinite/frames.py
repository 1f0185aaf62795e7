"""Frames: what one call of a module took and gave, in the forward or the backward pass, or one parameter in a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal, get_args

from traindiff.core.site import ROOT, printable
from traindiff.observe.torch.nonfinite.reading import Reading

Part = Literal["forward", "backward", "gradient", "optimizer"]

PARTS: tuple[Part, ...] = get_args(Part)
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

    def read(self, prefix: str) -> list[tuple[str, Reading]]:
        """Name and reading of each of its tensors whose name begins so."""
        return [
            (line.name, line.reading)
            for line in self.lines
            if line.reading is not None and line.name.startswith(prefix)
        ]

    def __str__(self) -> str:
        """As printed: the path and the class, and a line for each tensor."""
        title = f"{_INDENT}{printable(self.path or ROOT)} {self.kind}"
        return "\n".join([f"{title} ({self.note})" if self.note else title, *map(str, self.lines)])


_PREFIX = " " * 17


class Journal:
    """Keeps frames.

    Args:
        size: How many of each part.
        traced: Steps of which every frame is printed.
        write: Prints a text and ends the line.
    """

    def __init__(self, *, size: int, traced: Collection[int], write: Callable[[str], None]) -> None:
        self._print = write
        self._traced = frozenset(traced)
        self._begun: int | None = None
        self._frames: dict[Part, deque[Frame]] = {part: deque(maxlen=size) for part in PARTS}

    def traces(self, step: int) -> bool:
        """True if every frame of a step is printed."""
        return step in self._traced

    def add(self, frame: Frame, *, step: int) -> None:
        """Keep a frame; print it, if its step is traced."""
        if frame in self._frames[frame.part]:
            return
        self._frames[frame.part].append(frame)
        if step in self._traced:
            if self._begun != step:
                self._begun = step
                self._print(f"\n\n{_PREFIX} *** Starting batch number={step} ***\n{HEAD}")
            self._print(str(frame))

    def end_step(self, step: int) -> None:
        """A step has ended: what it left behind the forward pass is of no use to the next."""
        if self._begun == step:
            self._begun = None
            self._print(f"{_PREFIX} *** Finished batch number={step} ***\n\n")
        for part in PARTS[1:]:
            self._frames[part].clear()

    def clear(self) -> None:
        """Let go of all frames."""
        for frames in self._frames.values():
            frames.clear()

    def lines(self) -> Iterator[str]:
        """The frames as printed, part by part, each under its heading."""
        for part, frames in self._frames.items():
            if frames:
                yield f"Last {len(frames)} {part} frames:"
                yield HEAD
                yield from map(str, frames)

    @property
    def is_empty(self) -> bool:
        """True if there is no frame."""
        return not any(self._frames.values())
