"""Samples of the batch, contributions of micro-batches, and calls that clip gradients, from one step's table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from traindiff.analyse.findings import more_text, ranks_text
from traindiff.analyse.merge.placed_parts import ranks_of
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable, ranks_in
from traindiff.core.observation import ALIGNMENTS, ALL_GRADIENTS, CLEARED, SAMPLE
from traindiff.core.summary import UNIT_ROUNDOFF, add, largest, number


class Sample(NamedTuple):
    """One sample of a batch: its micro-step, rank and place, and the fingerprint of its values."""

    micro_step: int
    rank: int
    place: int
    fingerprint: int


Samples = Mapping[tuple[str, str], Sequence[Sample]]
"""The samples of a step by path and slot of their batch, ordered by micro-step, then by rank."""


def samples_of(table: StepTable) -> Samples:
    """The samples of a step. If several ranks work on the same samples, those of the first."""
    found: dict[tuple[str, str], dict[tuple[int, int, int], Sample]] = {}
    for key, entry in table.items():
        if key.phase != "batch" or key.stage != SAMPLE or entry.unobserved:
            continue
        by_place = found.setdefault((key.path, key.slot), {})
        for part in entry.parts:
            one = Sample(part.micro_step, part.rank, key.call, int(part.summary["fingerprint"]))
            by_place.setdefault((part.micro_step, part.term, key.call), one)
    return {site: sorted(by_place.values()) for site, by_place in found.items()}


def num_cleared(table: StepTable) -> int:
    """Number of micro-steps whose gradients were cleared before any step read them: the first ones of the step."""
    marks = (one for key, one in table.items() if key[:2] == ("grad", CLEARED) and not one.unobserved)
    return max((int(number(part.summary)) + 1 for one in marks for part in one.parts), default=0)


EFFECT = 1e-6
"""Clipping by a factor less than this below 1 has no effect: torch adds 1e-6 to the norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """One call that clipped gradients.

    Attributes:
        entry: Of its limit.
        limit: The largest norm, or the largest magnitude of an element.
        norm: The norm before clipping, finite or not; None if elements are clipped.
        effective: Whether it changed the gradients in a known way; false if their norm was not finite.
        only: The ranks that called it, if others did not.
    """

    entry: MergedSite
    limit: float
    norm: float | None
    effective: bool
    only: tuple[int, ...] = ()

    @property
    def coefficient(self) -> float:
        """Factor that it applied to the gradients; 1 if elements are clipped."""
        return 1.0 if self.norm is None or not self.effective else self.limit / (self.norm + 1e-6)

    @property
    def what(self) -> str:
        """Its limit, in words that follow "clips"."""
        where = f" on {ranks_text(self.only, capital=False)} only" if self.only else ""
        limit = self._limit_by_rank() or f"{self.limit:g}{where}"
        return f"elements of gradients to {limit}" if self.norm is None else f"gradients to a norm of {limit}"

    def _limit_by_rank(self) -> str:
        """`0.5 on rank 0 and 0.2 on rank 1`, if ranks have different limits; else empty."""
        ranks: dict[float, list[int]] = {}
        for part in self.entry.parts:
            ranks.setdefault(number(part.summary), []).append(part.rank)
        if len(ranks) < 2:
            return ""
        shown = [f"{limit:g} on {ranks_text(same, capital=False)}" for limit, same in ranks.items()]
        return " and ".join(shown) if len(shown) == 2 else f"{', '.join(shown[:3])}{more_text(len(shown) - 3, 'limit')}"


def is_clip(key: SiteKey) -> bool:
    """True if a key is that of the norm or the limit of a call that clips."""
    return key[:3] == ("grad", "clipped", ALL_GRADIENTS)


def clips(table: StepTable) -> list[Clip]:
    """The calls of a step that clip gradients, in the order of execution."""
    found = []
    limits = [(key, entry) for key, entry in table.items() if key[1] == "clipped" and is_clip(key)]
    if not limits:
        return []
    held = ranks_in({key: entry for key, entry in table.items() if key[:2] == ("grad", "")})
    for key, entry in limits:
        if key.slot not in ("max_norm", "max_value") or entry.unobserved:
            continue
        limit = number(entry.summary)
        norm = None if key.slot == "max_value" else _norm(table, key)
        if key.slot == "max_norm" and norm is None:
            continue
        effective = (
            _reaches(table, limit) if norm is None else math.isfinite(norm) and limit / (norm + 1e-6) < 1.0 - EFFECT
        )
        ranks = ranks_of(entry.parts)
        only = tuple(sorted(ranks)) if ranks < held else ()
        found.append(Clip(entry=entry, limit=limit, norm=norm, effective=effective, only=only))
    return found


def size_of_alignments(tables: Iterable[StepTable]) -> float:
    """The size of the largest loss of a step that sums over alignments, in any run; see `ALIGNMENTS`. 0 without one."""
    found = (entry for table in tables for key, entry in table.items() if key.stage == ALIGNMENTS)
    return max((number(entry.summary) for entry in found if not entry.unobserved), default=0.0)


def _norm(table: StepTable, key: SiteKey) -> float | None:
    for slot in ("norm", "squared_norm"):
        entry = table.get(key._replace(slot=slot))
        if entry is not None and not entry.unobserved:
            value = number(entry.summary)
            if value < 0.0:
                return None
            return value if slot == "norm" or not math.isfinite(value) else math.sqrt(value)
    return None


def _reaches(table: StepTable, limit: float) -> bool:
    """True if the largest element of any gradient equals the limit, in the gradient's dtype."""
    gradients = (entry for key, entry in table.items() if key[:2] == ("grad", "") and not entry.unobserved)
    return any(
        abs(float(largest(entry.summary)) / limit - 1.0) <= max(1e-6, UNIT_ROUNDOFF.get(entry.dtype, 0.0))
        for entry in gradients
        if limit
    )


_ALL_RANKS = -1
"""In a compact recording, contributions are known as the sum over all ranks."""


def contributions(table: StepTable) -> dict[str, dict[tuple[int, int], Any]]:
    """By path: gradient of each micro-batch, by micro-step and rank; copies count once.

    Of a site of a compact recording whose ranks are merged, the rank is -1: all of them.
    """
    found: dict[str, dict[tuple[int, int], Any]] = {}
    for key, entry in table.items():
        if key.phase != "grad" or key.stage != "micro" or key.call or entry.unobserved:
            continue
        if entry.abridged is not None:
            found[key.path] = {(number, _ALL_RANKS): one for number, one in entry.abridged.micro_steps.items()}
            continue
        terms = {(part.micro_step, part.term, part.shard): part for part in reversed(entry.parts)}
        by_place: dict[tuple[int, int], list[Any]] = {}
        for part in terms.values():
            by_place.setdefault((part.micro_step, part.rank), []).append(part.summary)
        found[key.path] = {
            place: add(parts) if len(parts) > 1 else np.array(parts[0])[()]  # a copy
            for place, parts in sorted(by_place.items())
        }
    return found
