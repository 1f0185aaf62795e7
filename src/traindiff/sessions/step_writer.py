"""Where the steps of a session go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from traindiff.detail import Detail
from traindiff.observation import Observation
from traindiff.recording import RecordingWriter
from traindiff.sessions.background import BackgroundWriter, Follower, opened_in_time


class StepWriter(Protocol):
    """Takes what one rank of a run has to say; see `BackgroundWriter`, which writes it to a disk."""

    def write_run(self, run: Mapping[str, Any]) -> None:
        """Take the content of `run.json`, if this is the lowest rank that is recorded."""

    def write_rank(self, content: Mapping[str, Any]) -> None:
        """Take the content of `rank.json`."""

    def write_step(
        self, observations: Sequence[Observation], summaries: Sequence[Any], details: Mapping[int, Detail]
    ) -> None:
        """Take a step of one optimizer, or a part of one. Some summaries may be `Deferred`."""

    def close(self, content: Mapping[str, Any] | None = None) -> None:
        """There is no more to come; `content` is that of `rank.json`, now that the training has ended."""


OpenWriter = Callable[[Mapping[str, Any], int, int], StepWriter]
"""Makes a writer of the content of `run.json`, this rank, and the number of ranks."""


def on_disk(path: str, *, overwrite: bool, follower: Follower | None = None) -> OpenWriter:
    """Has steps written to a recording.

    Args:
        path: Its directory.
        overwrite: Replace a recording that is already there.
        follower: Given each step that was written, if there is one.
    """
    return partial(_open_on_disk, path, overwrite, follower)


def _open_on_disk(
    path: str,
    overwrite: bool,  # noqa: FBT001
    follower: Follower | None,
    run: Mapping[str, Any],
    rank: int,
    world_size: int,
) -> StepWriter:
    files = partial(RecordingWriter, path, run=run, rank=rank, world_size=world_size, overwrite=overwrite)
    return BackgroundWriter(opened_in_time(files, path), follower=follower)
