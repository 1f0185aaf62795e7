"""The last frames of each part of a step, and, where steps are traced, all of them, printed as they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator

from traindiff.watching.frames import HEAD, PARTS, Frame, Part, printed

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
        """Whether every frame of a step is printed."""
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

    def lines(self, last: Frame | None = None) -> Iterator[str]:
        """The frames as printed, part by part; none behind `last`."""
        for part, kept in self._frames.items():
            frames = list(kept)
            if last is not None and last in frames:
                frames = frames[: frames.index(last) + 1]
            yield from printed(frames, part)
            if last is not None and frames and frames[-1] is last:
                return

    @property
    def is_empty(self) -> bool:
        """Whether there is no frame."""
        return not any(self._frames.values())
