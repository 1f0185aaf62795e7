"""Where the steps of a session go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from traindiff.detail import Detail
from traindiff.observation import Observation
from traindiff.recording import RecordingWriter
from traindiff.sessions.background import BackgroundWriter


class StepWriter(Protocol):
    """Takes what one rank of a run has to say; see `BackgroundWriter`, which writes it to a disk."""

    def write_run(self, run: Mapping[str, Any]) -> None:
        """Take the content of `run.json`, if this is rank 0."""

    def write_rank(self, content: Mapping[str, Any]) -> None:
        """Take the content of `rank.json`."""

    def write_step(
        self, observations: Sequence[Observation], summaries: Sequence[Any], details: Mapping[int, Detail]
    ) -> None:
        """Take a step of one optimizer, or a part of one. Some summaries may be `Deferred`."""

    def close(self) -> None:
        """There is no more to come."""


OpenWriter = Callable[[Mapping[str, Any], int, int], StepWriter]
"""Makes a writer of the content of `run.json`, this rank, and the number of ranks."""


def on_disk(path: str, *, overwrite: bool) -> OpenWriter:
    """Has steps written to a recording.

    Args:
        path: Its directory.
        overwrite: Replace a recording that is already there.
    """
    return partial(_open_on_disk, path, overwrite)


def _open_on_disk(path: str, overwrite: bool, run: Mapping[str, Any], rank: int, world_size: int) -> StepWriter:  # noqa: FBT001
    files = RecordingWriter(path, run=run, rank=rank, world_size=world_size, overwrite=overwrite)
    return BackgroundWriter(files)
