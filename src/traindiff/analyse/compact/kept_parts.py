"""What is kept of the parts of a site when its ranks are merged: what rules and comparisons ask of single ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from traindiff.analyse.merge.site import MergedSite, RankPart, SiteKey, StepTable
from traindiff.core.observation import BOUNDARY, WITNESS
from traindiff.core.orthogonality import TERMS
from traindiff.core.summary import nonfinite_count

MOST_COPIES = 16
"""Of copies that differ, so many different ones are kept; which ranks agree is kept of all."""

MOST_NONFINITE = 8
"""So many parts with NaN or infinities are kept of a site."""

_ALWAYS = frozenset({WITNESS, TERMS, "evaluation"})
"""Stages of few numbers, which rules ask rank by rank."""


def kept_parts(table: StepTable, key: SiteKey, entry: MergedSite) -> set[int]:
    """Positions of the parts of a site whose numbers are kept."""
    parts = entry.parts
    if key.phase == "batch" or key.stage in _ALWAYS or all(part.shard.size <= 1 for part in parts):
        return set(range(len(parts)))
    if key[:2] == ("grad", "micro") and _is_apart(table.get(key._replace(stage=""))):
        return set(range(len(parts)))  # a copy may be a rank's own contribution
    if key.stage == BOUNDARY and _was_changed(table, key, entry):
        return set(range(len(parts)))
    found = set(_nonfinite(parts)) if nonfinite_count(entry.summary) else set()
    if entry.apart:
        found.update(_copies_apart(parts))
    return found


def _is_apart(entry: MergedSite | None) -> bool:
    return entry is not None and bool(entry.apart)


def _nonfinite(parts: Sequence[RankPart]) -> list[int]:
    """The first parts with NaN or infinities."""
    return [at for at, part in enumerate(parts) if nonfinite_count(part.summary)][:MOST_NONFINITE]


def _copies_apart(parts: Sequence[RankPart]) -> Iterator[int]:
    """Parts of shards of which ranks hold different copies: all that hold one of the first different ones."""
    boxes: dict[tuple[object, ...], dict[int, list[int]]] = {}
    for at, part in enumerate(parts):
        bits = boxes.setdefault((part.micro_step, part.shard), {})
        bits.setdefault(int(part.summary["fingerprint"]), []).append(at)
    for bits in boxes.values():
        if len(bits) > 1:
            for same in sorted(bits.values(), key=lambda same: (-len(same), same))[:MOST_COPIES]:
                yield from same


def _was_changed(table: StepTable, key: SiteKey, entry: MergedSite) -> bool:
    """True if what a pipeline stage sent is not what the next one received, by their bits; or if one end is missing."""
    other = table.get(_other_end(key) or key)
    if other is None or other is entry or other.dtype != entry.dtype:
        return True
    bits = _bits_by_place(other)
    return any(bits.get(place) != one for place, one in _bits_by_place(entry).items())


_STAGE = re.compile(r"stage\[(\d{1,9})\]")


def _other_end(key: SiteKey) -> SiteKey | None:
    """The key of the other end of a boundary between two pipeline stages."""
    stage = _STAGE.fullmatch(key.path)
    if stage is None:
        return None
    for name, other, step in (("sent", "received", 1), ("received", "sent", -1)):
        if key.slot.startswith(name):
            return key._replace(path=f"stage[{int(stage[1]) + step}]", slot=f"{other}{key.slot.removeprefix(name)}")
    return None


def _bits_by_place(entry: MergedSite) -> Mapping[tuple[object, ...], int]:
    return {(part.micro_step, part.shard): int(part.summary["fingerprint"]) for part in entry.parts}
