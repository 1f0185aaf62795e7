"""Messages of ranks to rank 0 after a batch: the steps of each run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from traindiff.analyse.merge.run_steps import RunStep
from traindiff.core.kernels.rows import resolved
from traindiff.core.observation import Observation
from traindiff.core.summary import Detail
from traindiff.observe.common.writing import StepWriter
from traindiff.storage import RankStatus, StepObservations


class LiveRun:
    """A run that is being trained, as a `traindiff.storage.Run`; `run` is the content of `run.json`."""

    def __init__(self, path: str, world_size: int) -> None:
        self.path = path
        self.run: Mapping[str, Any] = {}
        self.world_size = world_size
        self._contents: dict[int, Mapping[str, Any]] = {}

    def hear(self, rank: int, *, run: Mapping[str, Any] | None, content: Mapping[str, Any] | None) -> None:
        """Store the content of a rank."""
        if run is not None and rank == 0:
            self.run = run
        if content is not None:
            self._contents[rank] = content

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks whose content is known."""
        return tuple(sorted(self._contents))

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Empty: a lockstep has all ranks."""
        return ()

    def rank_content(self, rank: int) -> Mapping[str, Any]:
        """The content of a rank."""
        return self._contents[rank]

    def status(self, rank: int) -> RankStatus:
        """Always `closed`: nothing is missing from a lockstep."""
        return RankStatus(rank=rank, ending="closed", message="")


class LiveSteps:
    """The steps of a replica that trains beside the baseline, as they come."""

    def __init__(self) -> None:
        self._steps: dict[tuple[str, int], RunStep] = {}

    def add(self, step: RunStep) -> None:
        """Add a step."""
        self._steps[step.optimizer, step.step] = step

    def until(self, optimizer: str, step: int) -> Iterator[RunStep]:
        """The steps up to and including this one that were not given yet."""
        for key in sorted(key for key in self._steps if key[0] == optimizer and key[1] <= step):
            yield self._steps.pop(key)


_SETTING = re.compile(r".*\.groups\[\d+\]")


class LiveWriter:
    """A `StepWriter` that keeps one rank's steps for the comparison at once; `further` writes them elsewhere.

    Settings of optimizers are left out: they are compared separately, and are no difference in the computation.
    """

    def __init__(self, run: Mapping[str, Any], rank: int, further: StepWriter | None = None) -> None:
        self.run = run
        self.content: Mapping[str, Any] = {}
        self._rank = rank
        self._further = further
        self._steps: dict[tuple[str, int], tuple[list[Observation], list[Any]]] = {}

    def write_run(self, run: Mapping[str, Any]) -> None:
        """Keep the content of `run.json`."""
        self.run = run
        if self._further is not None:
            self._further.write_run(run)

    def write_rank(self, content: Mapping[str, Any]) -> None:
        """Keep the content of `rank.json`."""
        self.content = content
        if self._further is not None:
            self._further.write_rank(content)

    def write_step(
        self, observations: Sequence[Observation], summaries: Sequence[Any], details: Mapping[int, Detail]
    ) -> None:
        """Keep the observations of a step."""
        if observations:
            held = self._steps.setdefault((observations[0].optimizer, observations[0].step), ([], []))
            for seen, summary in zip(observations, summaries, strict=True):
                if not (seen.phase == "optimizer" and _SETTING.fullmatch(seen.path)):
                    held[0].append(seen)
                    held[1].append(summary)
        if self._further is not None:
            self._further.write_step(observations, summaries, details)

    def close(self, content: Mapping[str, Any] | None = None) -> None:
        """Forget the steps."""
        self._steps.clear()
        if self._further is not None:
            self._further.close(content)

    @property
    def num_waiting(self) -> int:
        """Number of steps that were not taken yet."""
        return len(self._steps)

    def take(self) -> list[StepObservations]:
        """Remove and return the steps; waits for summaries that a device still computes."""
        steps, self._steps = self._steps, {}
        return [
            StepObservations(
                rank=self._rank, optimizer=optimizer, step=step, observations=seen, summaries=resolved(summaries)
            )
            for (optimizer, step), (seen, summaries) in steps.items()
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMessage:
    """A rank's message about one run.

    Attributes:
        run: Content of `run.json`; None if it was sent before.
        content: Content of `rank.json`; None if it was sent before.
        steps: The steps that the rank has ended since the last message.
    """

    run: Mapping[str, Any] | None
    content: Mapping[str, Any] | None
    steps: Sequence[StepObservations]
