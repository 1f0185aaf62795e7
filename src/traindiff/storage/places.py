"""Which ranks and micro-steps have which parts of a site, in a recording whose ranks are merged. See FORMAT.md."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

from traindiff.core.observation import Observation
from traindiff.core.shards import Shard
from traindiff.core.summary import empty
from traindiff.core.untrusted.demands import damaged
from traindiff.storage.location import PLACES
from traindiff.storage.stream import RankStream, StepObservations
from traindiff.storage.writer import RecordingWriter


class Place(NamedTuple):
    """Where one part of a site is: its micro-step, its rank, the elements that it has, and its term of a sum."""

    micro_step: int
    rank: int
    shard: Shard
    term: int


class Places(tuple[Place, ...]):
    """The places of all parts of a site. Many sites, in all steps, share one object."""

    @cached_property
    def ranks(self) -> frozenset[int]:
        """The ranks that have a part."""
        return frozenset(one.rank for one in self)

    @cached_property
    def first_of_each_shard(self) -> tuple[int, ...]:
        """The position of the first place of each part of the whole."""
        found: dict[Shard, int] = {}
        for at, place in enumerate(self):
            found.setdefault(place.shard, at)
        return tuple(found.values())

    @cached_property
    def shards(self) -> frozenset[Shard]:
        """The different parts of the whole."""
        return frozenset(one.shard for one in self)

    @cached_property
    def num_micro_steps(self) -> int:
        """One more than the largest number of a micro-step; 0 without any."""
        return 1 + max((one.micro_step for one in self), default=-1)

    @cached_property
    def digest(self) -> bytes:
        """Equal for equal places of two recordings."""
        return hashlib.sha256(repr(tuple(self)).encode()).digest()


class PlaceSource(Protocol):
    """Lists of places by their numbers."""

    def of(self, number: int) -> Places:
        """A list by its number."""


class PlaceLists:
    """The lists of places of a recording, read when they are first asked for.

    Args:
        stream: The stream that holds them.
        world_size: Number of ranks of the run.
        where: Its directory, for messages.
    """

    def __init__(self, stream: RankStream, world_size: int, where: str) -> None:
        self._stream: Iterator[StepObservations] = stream.steps()
        self._lists: list[Places] = []
        self._world_size = world_size
        self._where = where

    def of(self, number: int) -> Places:
        """A list by its number.

        Raises:
            CorruptRecordingError: There is no such list, or it names ranks that the run does not have.
        """
        while len(self._lists) <= number:
            step = next(self._stream, None)
            if step is None or step.step != len(self._lists):
                raise damaged(self._where, f"places {len(self._lists)} are missing")
            self._lists.append(self._checked(step))
        return self._lists[number]

    def _checked(self, step: StepObservations) -> Places:
        found = Places(Place(one.micro_step, one.call, one.shard, one.term) for one in step.observations)
        if any(one.rank >= self._world_size for one in found):
            raise damaged(self._where, f"places {step.step} name a rank that the run does not have")
        return found


class PlaceNumbers:
    """Numbers lists of places in the order in which they are met, each once."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[Place, ...], int] = {}
        self._lists: list[Places] = []

    def of(self, number: int) -> Places:
        """A list by its number."""
        return self._lists[number]

    def number(self, places: Sequence[Place]) -> int:
        """The number of a list."""
        key = tuple(places)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._numbers)
            self._lists.append(Places(key))
            self.met(number)
        return number

    def met(self, number: int) -> None:
        """Called when a list is met for the first time."""


class PlaceWriter(PlaceNumbers):
    """Writes lists of places, each once; it is on disk when its number is known.

    Args:
        writer: Of the stream for them.
    """

    def __init__(self, writer: RecordingWriter) -> None:
        super().__init__()
        self._writer = writer

    def met(self, number: int) -> None:
        """Write a list."""
        rows = [_row(number, order, place) for order, place in enumerate(self.of(number))]
        self._writer.write_step(rows, empty(len(rows)))


def _row(number: int, order: int, place: Place) -> Observation:
    return Observation(
        step=number, micro_step=place.micro_step, optimizer=PLACES, phase="param", stage="", path="", slot="",
        call=place.rank, order=order, dtype="", shard=place.shard, term=place.term,
    )  # fmt: skip
