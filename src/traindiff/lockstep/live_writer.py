"""The steps of a side, kept in memory until they are compared."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from traindiff.detail import Detail
from traindiff.kernels.store import resolved
from traindiff.observation import Observation
from traindiff.recording import StepObservations
from traindiff.sessions.step_writer import StepWriter

_SETTING = re.compile(r".*\.groups\[\d+\]")


class LiveWriter:
    """Takes the steps of one rank of a run, for a comparison that follows at once.

    Settings of optimizers are left out: they are compared by themselves, and are no difference in what was computed.

    Args:
        run: Content of `run.json`.
        rank: This rank.
        further: Takes the same, e.g. to keep it on a disk.

    Attributes:
        run: Content of `run.json`.
        content: Content of `rank.json`.
    """

    def __init__(self, run: Mapping[str, Any], rank: int, further: StepWriter | None = None) -> None:
        self.run = run
        self.content: Mapping[str, Any] = {}
        self._rank = rank
        self._further = further
        self._steps: dict[tuple[str, int], tuple[list[Observation], list[Any]]] = {}

    def write_run(self, run: Mapping[str, Any]) -> None:
        """See `StepWriter`."""
        self.run = run
        if self._further is not None:
            self._further.write_run(run)

    def write_rank(self, content: Mapping[str, Any]) -> None:
        """See `StepWriter`."""
        self.content = content
        if self._further is not None:
            self._further.write_rank(content)

    def write_step(
        self, observations: Sequence[Observation], summaries: Sequence[Any], details: Mapping[int, Detail]
    ) -> None:
        """See `StepWriter`."""
        if observations:
            held = self._steps.setdefault((observations[0].optimizer, observations[0].step), ([], []))
            for seen, summary in zip(observations, summaries, strict=True):
                if not (seen.phase == "optimizer" and _SETTING.fullmatch(seen.path)):
                    held[0].append(seen)
                    held[1].append(summary)
        if self._further is not None:
            self._further.write_step(observations, summaries, details)

    def close(self, content: Mapping[str, Any] | None = None) -> None:
        """See `StepWriter`."""
        self._steps.clear()
        if self._further is not None:
            self._further.close(content)

    @property
    def num_waiting(self) -> int:
        """How many steps wait to be taken."""
        return len(self._steps)

    def take(self) -> list[StepObservations]:
        """Remove and give what has come; waits for summaries that a device is still making."""
        steps, self._steps = self._steps, {}
        return [
            StepObservations(
                rank=self._rank, optimizer=optimizer, step=step, observations=seen, summaries=resolved(summaries)
            )
            for (optimizer, step), (seen, summaries) in steps.items()
        ]
