"""A run that is being trained, as the analysis sees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from traindiff.merging.run_steps import RunStep
from traindiff.recording import RankStatus


class LiveRun:
    """What is known of a run that is being trained; one of `traindiff.recording.Run`.

    Args:
        path: What it is called.
        world_size: Number of ranks.

    Attributes:
        path: What it is called.
        run: Content of `run.json`, as rank 0 has said it.
        world_size: Number of ranks.
    """

    def __init__(self, path: str, world_size: int) -> None:
        self.path = path
        self.run: Mapping[str, Any] = {}
        self.world_size = world_size
        self._contents: dict[int, Mapping[str, Any]] = {}

    def hear(self, rank: int, *, run: Mapping[str, Any] | None, content: Mapping[str, Any] | None) -> None:
        """A rank has said what it holds."""
        if run is not None and rank == 0:
            self.run = run
        if content is not None:
            self._contents[rank] = content

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that have said what they hold."""
        return tuple(sorted(self._contents))

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """None: all ranks of a lockstep are there."""
        return ()

    def rank_content(self, rank: int) -> Mapping[str, Any]:
        """See `traindiff.recording.Run`."""
        return self._contents[rank]

    def status(self, rank: int) -> RankStatus:
        """It goes on."""
        return RankStatus(rank=rank, ending="closed", says="")


class LiveSteps:
    """The steps of a replica that is stepped along, as they come."""

    def __init__(self) -> None:
        self._steps: dict[tuple[str, int], RunStep] = {}

    def add(self, step: RunStep) -> None:
        """A step has come."""
        self._steps[step.optimizer, step.step] = step

    def until(self, optimizer: str, step: int) -> Iterator[RunStep]:
        """The steps up to and with this one that were not given yet."""
        for key in sorted(key for key in self._steps if key[0] == optimizer and key[1] <= step):
            yield self._steps.pop(key)
