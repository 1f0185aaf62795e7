"""Runs functions in other processes: of this machine, or of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

from traindiff.errors import ConfigError, Problem
from traindiff.storage.stores import protocol_of

Workers = int | str | None
"""Number of worker processes on this machine, or `"ray"`; None for the process that asks alone."""

RAY: Literal["ray"] = "ray"


class Tasks(Protocol):
    """Runs functions in worker processes."""

    @property
    def size(self) -> int:
        """Number of tasks that run at a time."""

    def ordered(
        self, function: Callable[..., Any], calls: Iterable[tuple[Any, ...]], *, task_bytes: int
    ) -> Iterator[Any]:
        """The results of calls, in their order. No more are computed ahead than there are workers, and one.

        A call whose worker dies is made again.

        Args:
            function: One of a module; it gives the same result whenever it is called.
            calls: The arguments of each call.
            task_bytes: Memory that a call takes at most, about.

        Raises:
            WorkerError: Workers died again and again.
        """


def tasks_of(workers: Workers) -> AbstractContextManager[Tasks | None]:
    """What runs tasks, if that is wanted; to be used in a `with` statement.

    Raises:
        ConfigError: The number cannot be used, or Ray is not installed or not reached.
    """
    if workers is None:
        return nullcontext()
    if workers == RAY:
        from traindiff.analyse.blocks.on_ray import RayTasks

        return RayTasks()
    number = _number(workers)
    if number is None:
        fix = f'Write a number of processes, at least 1, or "{RAY}" for a Ray cluster.'
        problem = Problem(where=f"workers={workers!r}", what="is no number of workers.", fix=fix)
        raise ConfigError("workers", [problem], consequence="nothing was read")
    from traindiff.analyse.blocks.pool import Pool

    return Pool(number)


def refuse_workers(workers: Workers, follow: object, *recordings: str | os.PathLike[str]) -> None:
    """Refuse workers for what they cannot read.

    Args:
        workers: The workers, if any.
        follow: What follows the run, if it goes on: each of its steps is read when it is there.
        recordings: Paths of the recordings.

    Raises:
        ConfigError: The run is followed, or a recording is in the memory of this process.
    """
    if workers is None:
        return
    problems = []
    if follow is not None:
        what = "reads blocks of steps, and a run that is followed has them one by one."
        problems.append(Problem(where=f"workers={workers!r}", what=what, fix="Leave it out while the run goes on."))
    for path in [os.fspath(one) for one in recordings]:
        if protocol_of(path) == "memory":
            what = f"reads {path} in other processes, which do not have what is in the memory of this one."
            problems.append(
                Problem(where=f"workers={workers!r}", what=what, fix="Leave it out, or copy the recording.")
            )
    if problems:
        raise ConfigError("workers", problems, consequence="nothing was read")


def _number(workers: int | str) -> int | None:
    if isinstance(workers, str):
        return int(workers) if workers.isascii() and workers.isdigit() and int(workers) else None
    return workers if not isinstance(workers, bool) and workers >= 1 else None
