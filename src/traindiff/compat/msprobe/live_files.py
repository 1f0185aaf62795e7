"""msprobe's files of a training that runs, written step by step behind its recording."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from traindiff.detail import Detail
from traindiff.interop.msprobe.gradients import Kept, concerns_gradients, is_gradient, is_whole, whole_gradients
from traindiff.interop.msprobe.step_files import StepFiles
from traindiff.observation import Observation
from traindiff.summary import Summaries


class LiveFiles:
    """Writes what one rank holds whole; see `traindiff.sessions.background.Follower`.

    Args:
        files: Of the rank.
        rank: Its number.
        bounds: Of the intervals that are counted.

    Attributes:
        partial: Parameters of which this rank holds a part only, by canonical path.
        seen: Whether there was anything: a gradient, or the reason why there is none.
    """

    def __init__(self, files: StepFiles, *, rank: int, bounds: tuple[float, ...]) -> None:
        self.partial: dict[str, None] = {}
        self.seen = False
        self._files = files
        self._rank = rank
        self._bounds = bounds

    def write_step(
        self, observations: Sequence[Observation], summaries: Summaries, details: Mapping[int, Detail]
    ) -> None:
        """Write a step, or a further part of it."""
        self.seen = self.seen or bool(observations)
        kept = []
        for row, seen in enumerate(observations):
            if not concerns_gradients(seen):
                continue
            if is_gradient(seen) and not is_whole(seen):
                self.partial[seen.path] = None
                continue
            kept.append(Kept(seen=seen, rank=self._rank, summary=summaries[row], read=_Reader(details.get(row))))
        if kept:
            self._files.write(kept[0].seen.step, whole_gradients(kept, self._bounds))


class _Reader:
    """Gives what a recording keeps of an observation, without the way over its file."""

    def __init__(self, detail: Detail | None) -> None:
        self._detail = detail

    def __call__(self) -> Mapping[str, NDArray[np.generic]]:
        tensors = {} if self._detail is None else self._detail.tensors
        return {name: np.frombuffer(one.data, dtype=one.dtype).reshape(one.shape) for name, one in tensors.items()}
