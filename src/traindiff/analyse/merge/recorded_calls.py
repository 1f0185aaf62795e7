"""The calls that clip gradients, as a run has recorded them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from traindiff.analyse.findings import ranks_text
from traindiff.analyse.merge.step_table import Entry, Key
from traindiff.core.observation import ALL_GRADIENTS, SAMPLE
from traindiff.core.summary import largest, number


class Sample(NamedTuple):
    """One sample of a batch: when and where it was, and the fingerprint of what it holds."""

    micro_step: int
    rank: int
    place: int
    fingerprint: int


Samples = Mapping[tuple[str, str], Sequence[Sample]]
"""The samples of a step by path and slot of the batch that they are in, by micro-step, then by rank."""


def samples_of(table: Mapping[Key, Entry]) -> Samples:
    """The samples of a step. Of ranks that work on the same ones, those of the first."""
    found: dict[tuple[str, str], dict[tuple[int, int, int], Sample]] = {}
    for key, entry in table.items():
        if key.phase != "batch" or key.stage != SAMPLE or entry.unobserved:
            continue
        by_place = found.setdefault((key.path, key.slot), {})
        for part in entry.parts:
            one = Sample(part.micro_step, part.rank, key.call, int(part.summary["fingerprint"]))
            by_place.setdefault((part.micro_step, part.term, key.call), one)
    return {site: sorted(by_place.values()) for site, by_place in found.items()}


EFFECT = 1e-6
"""Clipping that multiplies by less than this below 1 has no effect: torch adds 1e-6 to the norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """One call that clipped gradients.

    Attributes:
        entry: Of its limit.
        limit: The largest norm, or the largest magnitude of an element.
        norm: The norm that it found; None where elements are clipped.
        effective: Whether it changed the gradients.
        only: The ranks that called it, where others did not.
    """

    entry: Entry
    limit: float
    norm: float | None
    effective: bool
    only: tuple[int, ...] = ()

    @property
    def coefficient(self) -> float:
        """What it multiplied the gradients by; 1 where elements are clipped."""
        return 1.0 if self.norm is None or not self.effective else self.limit / (self.norm + 1e-6)

    @property
    def what(self) -> str:
        """What it does, in words that follow "clips"."""
        where = f" on {ranks_text(self.only, capital=False)} only" if self.only else ""
        return (
            f"elements of gradients to {self.limit:g}{where}"
            if self.norm is None
            else f"gradients to a norm of {self.limit:g}{where}"
        )


def is_clip(key: Key) -> bool:
    """Whether this is the norm or the limit of a call that clips."""
    return key[:3] == ("grad", "clipped", ALL_GRADIENTS)


def clips(table: Mapping[Key, Entry]) -> list[Clip]:
    """The calls of a step that clip gradients, in the order of execution."""
    found = []
    held = {part.rank for key, entry in table.items() if key[:2] == ("grad", "") for part in entry.parts}
    for key, entry in table.items():
        if not is_clip(key) or key.slot not in ("max_norm", "max_value") or entry.unobserved:
            continue
        limit = number(entry.summary)
        norm = None if key.slot == "max_value" else _norm(table, key)
        if key.slot == "max_norm" and norm is None:
            continue
        effective = _reaches(table, limit) if norm is None else limit / (norm + 1e-6) < 1.0 - EFFECT
        ranks = {part.rank for part in entry.parts}
        only = tuple(sorted(ranks)) if ranks < held else ()
        found.append(Clip(entry=entry, limit=limit, norm=norm, effective=effective, only=only))
    return found


def _norm(table: Mapping[Key, Entry], key: Key) -> float | None:
    for slot in ("norm", "squared_norm"):
        entry = table.get(key._replace(slot=slot))
        if entry is not None and not entry.unobserved:
            value = number(entry.summary)
            value = value if slot == "norm" else math.sqrt(max(0.0, value))
            return value if math.isfinite(value) else None
    return None


def _reaches(table: Mapping[Key, Entry], limit: float) -> bool:
    """Whether the largest element of any gradient is as large as elements may be."""
    gradients = (entry for key, entry in table.items() if key[:2] == ("grad", "") and not entry.unobserved)
    return any(abs(float(largest(entry.summary)) / limit - 1.0) < 1e-6 for entry in gradients if limit)
