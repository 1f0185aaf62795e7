"""Worker processes of this machine."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from traindiff.errors import WorkerError

MOST_DEATHS = 3
"""Workers that die before another result has come."""


@dataclass(slots=True)
class _Call:
    """A call that was asked for, and what will hold its result; None if no process has it."""

    given: tuple[Any, ...]
    future: Future[Any] | None = None

    def result(self) -> Any:
        assert self.future is not None
        return self.future.result()

    def forget_unless_done(self) -> None:
        """Forget the process that had the call, unless it gave a result or an error of its own."""
        future = self.future
        done = future is not None and future.done() and not future.cancelled()
        if future is None or not done or isinstance(future.exception(), BrokenProcessPool):
            self.future = None


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
        waiting: deque[_Call] = deque()
        remaining, deaths = iter(calls), 0
        while True:
            while len(waiting) <= self._size and (given := next(remaining, None)) is not None:
                waiting.append(_Call(given))
            if not waiting:
                return
            try:
                for call in waiting:
                    call.future = call.future or self._executor.submit(function, *call.given)
                result = waiting[0].result()
            except BrokenProcessPool:
                deaths += 1
                if deaths == MOST_DEATHS:
                    raise WorkerError(
                        f"A worker process died {deaths} times before the next steps were read. It may have run out of "
                        "memory: use fewer workers, or none. Workers also import the script that starts them: what it "
                        'does belongs below if __name__ == "__main__".'
                    ) from None
                self._executor.shutdown(wait=True, cancel_futures=True)
                self._executor = self._new()
                for call in waiting:
                    call.forget_unless_done()
                continue
            waiting.popleft()
            deaths = 0
            yield result
            del result

    def _new(self) -> ProcessPoolExecutor:
        # Not forked: a fork of a process with threads, as Arrow and torch have, may wait for ever.
        return ProcessPoolExecutor(self._size, mp_context=multiprocessing.get_context("spawn"))
