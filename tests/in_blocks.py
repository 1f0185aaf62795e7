"""Recordings that are read in blocks of steps, cut anywhere, as worker processes do it, but in this process."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from random import Random
from typing import Any
from unittest import mock

from traindiff.analyse.blocks import steps
from traindiff.analyse.blocks.tasks import Tasks
from traindiff.analyse.compact import compacting
from traindiff.analyse.compare import comparing
from traindiff.analyse.merge.span import Span
from traindiff.storage import Recording


class InThisProcess:
    """Tasks whose arguments and results take the way through bytes. Some have a worker of their own.

    Args:
        random: Decides where runs are cut, and which blocks a worker knows none before.
    """

    size = 2

    def __init__(self, random: Random) -> None:
        self._random = random
        self.num_calls = 0

    def ordered(
        self, function: Callable[..., Any], calls: Iterable[tuple[Any, ...]], *, task_bytes: int
    ) -> Iterator[Any]:
        assert task_bytes > 0
        for call in calls:
            self.num_calls += 1
            if self._random.random() < 0.5:
                steps.Readers._latest = None
            yield pickle.loads(pickle.dumps(function(*pickle.loads(pickle.dumps(call)))))

    def blocks(self, recordings: Sequence[Recording], span: Span, size: int) -> tuple[list[Span], int]:
        """Blocks of any length, some of them of no step."""
        whole, task_bytes = _blocks(recordings, span, size)
        first, last = whole[0].begin, whole[-1].begin + 1
        cuts = sorted({self._random.randint(first + 1, last + 3) for _ in range(self._random.randint(0, 4))})
        begins = [first, *cuts]
        ends = [*(cut - 1 for cut in cuts), span.end]
        return [Span(begin=begin, end=end) for begin, end in zip(begins, ends, strict=True)], task_bytes


_blocks = steps.blocks


@contextmanager
def in_blocks(seed: int) -> Iterator[InThisProcess]:
    """Inside, what is given `workers` is read in blocks by this process."""
    tasks = InThisProcess(Random(seed))

    def tasks_of(workers: Any) -> AbstractContextManager[Tasks | None]:
        return nullcontext(None if workers is None else tasks)

    patched = [mock.patch.object(module, "tasks_of", tasks_of) for module in (steps, comparing, compacting)]
    patched.append(mock.patch.object(steps, "blocks", tasks.blocks))
    for one in patched:
        one.start()
    try:
        yield tasks
    finally:
        for one in patched:
            one.stop()
        steps.Readers._latest = None
