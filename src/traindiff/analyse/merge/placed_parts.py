"""The parts of a site of a compact recording: where all of them are, and the numbers of those that were kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from traindiff.core.shards import Shard
from traindiff.storage.places import Place, Places


class RankPart(NamedTuple):
    """The part of a site that one rank holds, from one micro-step."""

    micro_step: int
    rank: int
    shard: Shard
    summary: Any  # relative to the global loss; None in a compact recording that did not keep it
    term: int = 0


class PlacedParts(Sequence[RankPart]):
    """Parts that are made when they are asked for: as a rule, nobody asks for those of a thousand ranks.

    Args:
        places: Where the parts are.
        alike: The numbers of every part, if all have the same.
        kept: Numbers of some parts, by position.
    """

    __slots__ = ("_alike", "_kept", "places")

    def __init__(self, places: Places, *, alike: Any = None, kept: Mapping[int, Any] | None = None) -> None:
        self.places = places
        self._alike = alike
        self._kept = kept or {}

    @property
    def are_known(self) -> bool:
        """True if the numbers of all parts are known."""
        return self._alike is not None or len(self._kept) == len(self.places)

    @property
    def known(self) -> Mapping[int, Any]:
        """The numbers that are known, by position; of parts that are all alike, those of one part of each shard."""
        return self._kept if self._alike is None else dict.fromkeys(self.places.first_of_each_shard, self._alike)

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, at: int) -> RankPart: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[RankPart, ...]: ...
    def __getitem__(self, at: int | slice) -> RankPart | tuple[RankPart, ...]:
        if isinstance(at, slice):
            return tuple(map(self._part, range(*at.indices(len(self)))))
        return self._part(range(len(self))[at])

    def __iter__(self) -> Iterator[RankPart]:
        return map(self._part, range(len(self)))

    def _part(self, at: int) -> RankPart:
        place = self.places[at]
        summary = self._kept.get(at) if self._alike is None else self._alike
        return RankPart(place.micro_step, place.rank, place.shard, summary, place.term)


@dataclass(frozen=True, slots=True, kw_only=True)
class Abridged:
    """What is kept of the parts of a site without their numbers.

    Attributes:
        codes: See `traindiff.analyse.merge.rank_codes`; None if there are too many ranks.
        terms: A hash of the bits of all parts, in their order.
        micro_steps: The sum over ranks, by micro-step; of gradients of micro-batches only.
    """

    codes: NDArray[np.float64] | None
    terms: int
    micro_steps: Mapping[int, Any] = field(default_factory=dict)


def are_known(parts: Sequence[RankPart]) -> bool:
    """True if the numbers of all parts are known."""
    return not isinstance(parts, PlacedParts) or parts.are_known


def hold_same_parts(baseline: Sequence[RankPart], candidate: Sequence[RankPart]) -> bool:
    """True if both runs have the same parts at the same places."""
    return _digest(baseline) == _digest(candidate)


def _digest(parts: Sequence[RankPart]) -> bytes:
    if isinstance(parts, PlacedParts):
        return parts.places.digest
    return Places(Place(part.micro_step, part.rank, part.shard, part.term) for part in parts).digest


def shards_of(parts: Sequence[RankPart]) -> frozenset[Shard]:
    """The different parts of the whole."""
    return parts.places.shards if isinstance(parts, PlacedParts) else frozenset(part.shard for part in parts)


def places_of(parts: Sequence[RankPart]) -> Sequence[RankPart | Place]:
    """Where the parts are, for those who do not ask for their numbers."""
    return parts.places if isinstance(parts, PlacedParts) else parts


def ranks_of(parts: Sequence[RankPart]) -> frozenset[int]:
    """The ranks that hold some parts."""
    return parts.places.ranks if isinstance(parts, PlacedParts) else frozenset(part.rank for part in parts)
