"""Signs of life of a process, by which a slow machine is told apart from a rank that hangs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

COMPUTING_FACTOR = 10.0
"""A second of computing counts this many times less than a second of waiting. A rank that computes may be in a long
step, or compile; but one that spins in an endless loop must be found too."""

_SHARE = 0.1
"""Least share of the time in which a process computes. Threads that only poll stay below a hundredth."""

_LONGEST_SECONDS = 5.0
"""Most of the time between two looks that counts: after more, the watching process itself had been stopped."""

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """A process and its children at one moment.

    Attributes:
        cpu_seconds: CPU time so far.
        wants_cpu: True if a thread runs, or would if a processor were free.
        wants_disk: True if a thread waits for a disk, which cannot be interrupted: reading, writing, swapping.
    """

    cpu_seconds: float
    wants_cpu: bool = False
    wants_disk: bool = False


def pulse(pid: int, processes: Path = Path("/proc")) -> Pulse | None:
    """The pulse of a process and its children; None if it has ended, or if the system has no `/proc`."""
    cpu_ticks, states = 0, set()
    for process in _family(processes, pid):
        fields = _fields(process / "stat")
        if fields is None:
            continue
        cpu_ticks += sum(map(int, fields[11:15]))  # utime, stime, and those of children that have ended
        states |= {own[0] for thread in _entries(process / "task") if (own := _fields(thread / "stat")) is not None}
    if not states:
        return None
    return Pulse(cpu_seconds=cpu_ticks / _TICKS_PER_SECOND, wants_cpu="R" in states, wants_disk="D" in states)


def machine() -> str:
    """An identifier of this machine since its start, as far as its processes see each other; empty without `/proc`."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _family(processes: Path, pid: int) -> Iterator[Path]:
    """The directories of a process and of its children, and theirs."""
    process = processes / str(pid)
    yield process
    for thread in _entries(process / "task"):
        try:
            children = (thread / "children").read_text().split()
        except OSError:
            continue  # it has just ended, or the kernel lists no children
        for child in children:
            yield from _family(processes, int(child))


def _fields(path: Path) -> list[str] | None:
    """The fields of a `stat` file from the state on; the name before it, in parentheses, may hold anything."""
    try:
        return path.read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []


@dataclass(slots=True)
class Clock:
    """How much time a process had, which is less than has passed if it was given no processor.

    Attributes:
        had: Seconds that it could use. Time in which it was runnable, and other processes ran, does not count.
        waited: Of the seconds since its last progress: those in which it did nothing.
        computed: CPU seconds that it used since then, at most one per second, and those in which it waited for a disk.
    """

    had: float = 0.0
    waited: float = 0.0
    computed: float = 0.0
    _looked: float | None = field(default=None, repr=False)
    _cpu_seconds: float | None = field(default=None, repr=False)

    @property
    def quiet(self) -> float:
        """Seconds without a sign of life; computing counts a tenth."""
        return self.waited + self.computed / COMPUTING_FACTOR

    def progress(self) -> None:
        """Count quiet time from now on."""
        self.waited = self.computed = 0.0

    def look(self, now: float, found: Pulse | None, *, progressed: bool = False) -> None:
        """Count the time since the last look.

        Args:
            now: Monotonic time in seconds.
            found: The pulse; None if it is not known, which counts as waiting.
            progressed: True if the process has shown in another way that it works.
        """
        passed = 0.0 if self._looked is None else min(_LONGEST_SECONDS, max(0.0, now - self._looked))
        used = 0.0
        if found is not None and self._cpu_seconds is not None:
            used = min(passed, max(0.0, found.cpu_seconds - self._cpu_seconds))
        self._looked = now
        self._cpu_seconds = found.cpu_seconds if found is not None else None
        if found is not None and found.wants_disk:
            used = passed
        elif not (progressed or used >= _SHARE * passed > 0.0 or (found is not None and found.wants_cpu)):
            self.had += passed
            self.waited += passed
            return
        self.had += used
        self.computed += used
