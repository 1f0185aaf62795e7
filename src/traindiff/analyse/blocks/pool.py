"""Worker processes of this machine."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from traindiff.errors import WorkerError

MOST_DEATHS = 3
"""Workers that die before another result has come."""


class Pool:
    """Runs functions in processes of this machine. To be used in a `with` statement.

    Args:
        size: Number of processes.
    """

    def __init__(self, size: int) -> None:
        self._size = size

    @property
    def size(self) -> int:
        """Number of tasks that run at a time."""
        return self._size

    def __enter__(self) -> Pool:
        self._executor = self._new()
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)

    def ordered(
        self,
        function: Callable[..., Any],
        calls: Iterable[tuple[Any, ...]],
        *,
        task_bytes: int,  # noqa: ARG002  processes of one machine share its memory
    ) -> Iterator[Any]:
        """See `traindiff.analyse.blocks.tasks.Tasks`."""
        waiting: deque[tuple[tuple[Any, ...], Future[Any]]] = deque()
        remaining, deaths = iter(calls), 0
        while True:
            try:
                while len(waiting) <= self._size and (call := next(remaining, None)) is not None:
                    waiting.append((call, Future()))
                    waiting[-1] = call, self._executor.submit(function, *call)
                if not waiting:
                    return
                result = waiting[0][1].result()
            except BrokenProcessPool:
                deaths += 1
                if deaths == MOST_DEATHS:
                    raise WorkerError(
                        f"A worker process died {deaths} times before the next steps were read. It may have run out of "
                        "memory: use fewer workers, or none."
                    ) from None
                self._start_again(function, waiting)
                continue
            waiting.popleft()
            deaths = 0
            yield result
            del result

    def _start_again(self, function: Callable[..., Any], waiting: deque[tuple[tuple[Any, ...], Future[Any]]]) -> None:
        """Start other processes, for the calls that have no result."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._executor = self._new()
        for at, (call, future) in enumerate(waiting):
            if not future.done() or future.cancelled() or isinstance(future.exception(), BrokenProcessPool):
                waiting[at] = call, self._executor.submit(function, *call)

    def _new(self) -> ProcessPoolExecutor:
        # Not forked: a fork of a process with threads, as Arrow and torch have, may wait for ever.
        return ProcessPoolExecutor(self._size, mp_context=multiprocessing.get_context("spawn"))
