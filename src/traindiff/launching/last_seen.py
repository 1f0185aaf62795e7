"""What a rank observed last, kept where it outlives the process."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Protocol

from traindiff.site import label

BYTES = 512
"""Size of the file. What does not fit is cut off."""


class Seen(Protocol):
    """What is kept of an observation."""

    @property
    def step(self) -> int:
        """See `traindiff.observation.Observation`."""

    @property
    def micro_step(self) -> int:
        """See `traindiff.observation.Observation`."""

    @property
    def phase(self) -> str:
        """See `traindiff.observation.Observation`."""

    @property
    def path(self) -> str:
        """See `traindiff.observation.Observation`."""

    @property
    def slot(self) -> str:
        """See `traindiff.observation.Observation`."""


class LastSeen:
    """Keeps what was observed last in a file that is mapped into memory.

    The system has the bytes as soon as they are assigned, so they are there however the process ends. One
    observation costs about a microsecond.

    Args:
        path: The file; replaced.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(b" " * BYTES)
        self._count = 0
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), BYTES)

    def __call__(self, seen: Seen) -> None:
        """Keep this one."""
        self._count += 1
        self._memory[:] = f"{self._count} {seen_text(seen)}".encode()[:BYTES].ljust(BYTES)


def seen_text(seen: Seen) -> str:
    """An observation in a few words."""
    return f"step {seen.step}, micro-step {seen.micro_step}, {seen.phase}, {label(seen.path, seen.slot)}"


def read_last_seen(path: Path) -> tuple[int, str]:
    """How many observations there were, and the last of them in a few words; 0 and nothing where there was none."""
    text = path.read_bytes().decode(errors="replace").strip() if path.exists() else ""
    count, _, last = text.partition(" ")
    return (int(count), last) if last else (0, "")
