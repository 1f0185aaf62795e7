"""Steps that two recordings hold in the same bytes, which are decoded once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple
from weakref import ReferenceType, ref

from traindiff.storage.batch_metadata import Message

if TYPE_CHECKING:
    from traindiff.storage.stream import StepObservations

_MOST_HEADS = 8
"""Of the latest messages of each rank: a step of each run, and the beginning of the next one, of a few optimizers."""


class Head(NamedTuple):
    """What is known of a message before it is decoded.

    Attributes:
        optimizer: The optimizer of its step.
        step: Number of its step.
        message: The message without its content.
    """

    optimizer: str
    step: int
    message: Message


class SameSteps:
    """What was read of two recordings that are read in turns: what both hold in the same bytes is decoded once.

    Messages are told apart by their SHA-256. A step is found as long as something else keeps it in memory.
    """

    def __init__(self) -> None:
        self._steps: dict[int, tuple[tuple[bytes, ...], ReferenceType[StepObservations]]] = {}
        self._heads: dict[int, dict[bytes, Head]] = {}

    def step(self, rank: int, digests: Sequence[bytes]) -> StepObservations | None:
        """The latest step of a rank that was decoded in either recording, if its messages have these digests."""
        known = self._steps.get(rank)
        return known[1]() if known is not None and known[0] == tuple(digests) else None

    def note_step(self, rank: int, digests: Sequence[bytes], step: StepObservations) -> None:
        """Note a step that was decoded."""
        self._steps[rank] = tuple(digests), ref(step)

    def head(self, rank: int, digest: bytes) -> Head | None:
        """What is known of a message of a rank, if it is one of the latest in either recording."""
        return self._heads.get(rank, {}).get(digest)

    def note_head(self, rank: int, digest: bytes, head: Head) -> None:
        """Note a message that was checked."""
        known = self._heads.setdefault(rank, {})
        known[digest] = head
        if len(known) > _MOST_HEADS:
            del known[next(iter(known))]
