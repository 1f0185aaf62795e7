"""What the analysis asks of a run, whether it is read from a disk or still being trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from traindiff.recording.stream import RankStatus


class Run(Protocol):
    """A run, but for its steps, which come one by one."""

    @property
    def path(self) -> str:
        """Where it is, or what it is called."""

    @property
    def run(self) -> Mapping[str, Any]:
        """Content of `run.json`."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that are there, ascending."""

    @property
    def world_size(self) -> int:
        """Number of ranks that it has."""

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks that should have been recorded and left nothing."""

    def rank_content(self, rank: int) -> Mapping[str, Any]:
        """Content of a rank's `rank.json`."""

    def status(self, rank: int) -> RankStatus:
        """How what a rank has recorded ends."""
