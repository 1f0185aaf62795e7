"""The single samples of a batch, as a run has recorded them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from traindiff.merging.step_table import Entry, Key
from traindiff.observation import SAMPLE


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
