"""The rows of a merged step, from its table. `traindiff.analyse.merge.merged_tables` makes the table of them again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, prod
from typing import Any

import numpy as np

from traindiff.analyse.compact.kept_parts import kept_parts
from traindiff.analyse.merge.placed_parts import Abridged, are_known
from traindiff.analyse.merge.rank_codes import WIDTH, codes_of, terms_of
from traindiff.analyse.merge.site import MergedSite, RankPart, SiteKey, StepTable
from traindiff.core.observation import Observation
from traindiff.core.shards import Shard
from traindiff.core.summary import SUMMARY, Summaries, add, empty
from traindiff.storage.merged_rows import ENTRY, MICRO_STEP, PART, RANKS, groups_text, listed
from traindiff.storage.places import Place, PlaceNumbers, Places


class Unmergeable(Exception):  # noqa: N818
    """A step has something that rows of merged steps cannot say, so it is stored rank by rank."""


@dataclass(slots=True, kw_only=True)
class Rows:
    """Rows of a step, and their numbers."""

    observations: list[Observation] = field(default_factory=list)
    summaries: list[Any] = field(default_factory=list)

    def add(self, observation: Observation, summary: Any) -> None:
        """Add a row."""
        self.observations.append(observation)
        self.summaries.append(summary)

    @property
    def numbers(self) -> Summaries:
        """All numbers."""
        return np.array(self.summaries, dtype=SUMMARY)


class RowMaker:
    """Makes the rows of the merged steps of a recording.

    Args:
        places: Numbers the places of parts.
        bits: Number of codes of a site; see `traindiff.analyse.merge.rank_codes`.
    """

    def __init__(self, places: PlaceNumbers, bits: int) -> None:
        self._places = places
        self._bits = bits
        self._latest: dict[SiteKey, tuple[Places, int]] = {}  # where the parts of a site were, and the list's number

    def rows(self, table: StepTable, *, optimizer: str, step: int) -> Rows:
        """The rows of a step.

        Raises:
            Unmergeable: Rows cannot say all of it.
        """
        rows = Rows()
        owners = []
        for key, entry in table.items():
            alike = _are_alike(entry)
            rows.add(
                _entry_row(key, entry, self._number(key, entry.parts), optimizer, step, alike=alike), entry.summary
            )
            owners.append((len(rows.observations) - 1, key, entry, alike))
        for row, key, entry, alike in owners:
            for kind, about, summary in self._further(table, key, entry, alike=alike):
                rows.add(rows.observations[row]._replace(evaluation=kind, order=row, unobserved="", **about), summary)
        return rows

    def _number(self, key: SiteKey, parts: Sequence[RankPart]) -> int:
        places = tuple(Place(part.micro_step, part.rank, part.shard, part.term) for part in parts)
        latest = self._latest.get(key)
        if latest is None or latest[0] != places:
            number = self._places.number(places)
            latest = self._latest[key] = self._places.of(number), number  # one object for all sites with these places
        return latest[1]

    def _further(
        self, table: StepTable, key: SiteKey, entry: MergedSite, *, alike: bool
    ) -> Iterable[tuple[int, dict[str, Any], Any]]:
        """Kind, columns and numbers of the rows about the parts of a site."""
        parts, before = entry.parts, entry.abridged
        if before is not None:  # merged before: from a recording that is compact already
            yield RANKS, _about_ranks(entry), _told(before)
            for number, summary in before.micro_steps.items():
                yield MICRO_STEP, {"micro_step": number}, summary
        if not are_known(parts):
            known = {at for at, part in enumerate(parts) if part.summary is not None}
            yield from _kept(parts, known)
            return
        if alike:
            if entry.apart or entry.spread:
                yield RANKS, _about_ranks(entry), empty()
            return
        kept = kept_parts(table, key, entry)
        if len(kept) < len(parts):
            told = Abridged(codes=codes_of(parts, self._bits) if self._bits else None, terms=terms_of(parts))
            yield RANKS, _about_ranks(entry), _told(told)
            if (key.phase, key.stage) == ("grad", "micro"):
                for number, summary in _by_micro_step(parts).items():
                    yield MICRO_STEP, {"micro_step": number}, summary
        elif entry.apart or entry.spread:
            yield RANKS, _about_ranks(entry), _told(Abridged(codes=None, terms=terms_of(parts)))
        yield from _kept(parts, kept)


def _entry_row(key: SiteKey, entry: MergedSite, places: int, optimizer: str, step: int, *, alike: bool) -> Observation:
    shape = entry.shape
    shard = Shard.of_batch(shape, first=0) if entry.batched else Shard.whole(shape)
    if not entry.placed or entry.origin or not (isfinite(entry.factor) and entry.factor > 0.0):
        raise Unmergeable
    if int(entry.summary["count"]) > prod(shape) or (entry.batched and not shape):
        raise Unmergeable
    return Observation(
        step=step, micro_step=key.micro_step, optimizer=optimizer, phase=key.phase, stage=key.stage, path=key.path,
        slot=key.slot, call=key.call, order=entry.order, dtype=entry.dtype, shard=shard,
        merge="sum" if entry.summed else "shard", weight=float(alike), factor=entry.factor, term=places,
        scaled=not entry.exact, unobserved=entry.unobserved, evaluation=ENTRY,
    )  # fmt: skip


def _about_ranks(entry: MergedSite) -> dict[str, Any]:
    return {"slot": groups_text(entry.apart), "weight": entry.spread}


def _told(abridged: Abridged) -> Any:
    """The numbers of the row that tells of the ranks of a site."""
    summary = empty()
    summary["fingerprint"] = abridged.terms
    if abridged.codes is not None:
        summary["sketch"][: len(abridged.codes) * WIDTH] = abridged.codes.reshape(-1)
    return summary


def _kept(parts: Sequence[RankPart], kept: Iterable[int]) -> Iterable[tuple[int, dict[str, Any], Any]]:
    """A row for the parts with the same numbers."""
    groups: dict[bytes, list[int]] = {}
    for at in sorted(kept):
        groups.setdefault(parts[at].summary.tobytes(), []).append(at)
    for same in groups.values():
        shard = parts[same[0]].shard
        yield PART, {"slot": listed(same), "shard": shard}, parts[same[0]].summary


def _are_alike(entry: MergedSite) -> bool:
    """True if each part has the numbers of the whole."""
    parts = entry.parts
    if not are_known(parts) or not len(parts):
        return False
    bits = entry.summary.tobytes()
    return all(part.summary is entry.summary or part.summary.tobytes() == bits for part in parts)


def _by_micro_step(parts: Sequence[RankPart]) -> Mapping[int, Any]:
    """The sum of the contributions of each micro-step; copies count once. As `contributions` adds them up."""
    terms = {(part.micro_step, part.term, part.shard): part for part in reversed(parts)}
    found: dict[int, list[Any]] = {}
    for part in terms.values():
        found.setdefault(part.micro_step, []).append(part.summary)
    return {number: add(same) for number, same in sorted(found.items())}
