"""Steps that two recordings hold in the same bytes, which are decoded once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

if TYPE_CHECKING:
    from traindiff.storage.stream import StepObservations


class SameSteps:
    """The latest step of each rank of two recordings that are read in turns: where both hold the same bytes, one step.

    A step is found as long as something else keeps it in memory.
    """

    def __init__(self) -> None:
        self._latest: dict[int, tuple[bytes, ReferenceType[StepObservations]]] = {}

    def find(self, rank: int, digest: bytes) -> StepObservations | None:
        """The latest step that was decoded of a rank of either recording, if its messages have this digest."""
        known, step = self._latest.get(rank, (b"", None))
        return step() if step is not None and known == digest else None

    def note(self, rank: int, digest: bytes, step: StepObservations) -> None:
        """Note a step that was decoded."""
        self._latest[rank] = digest, ref(step)


def digest_of(messages: Sequence[bytes]) -> bytes:
    """What only the same messages have."""
    digest = hashlib.sha256(usedforsecurity=False)
    for message in messages:
        digest.update(len(message).to_bytes(8, "little"))
        digest.update(message)
    return digest.digest()
