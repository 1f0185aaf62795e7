"""The batch of a step, sample by sample, as the model was given it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from traindiff.merging.samples import samples_of
from traindiff.merging.step_table import Entry, Key


class WholeSample(NamedTuple):
    """One sample: when and where it was, and the fingerprints of what all inputs hold of it."""

    micro_step: int
    rank: int
    place: int
    fingerprints: tuple[int, ...]


def whole_samples(table: Mapping[Key, Entry]) -> list[WholeSample]:
    """The samples of a step, each with what all inputs of the model have of it. Empty where they were not observed.

    Inputs that have none at a place (a scalar, a mask that all samples share) are left out.
    """
    by_place: dict[tuple[int, int, int], dict[str, int]] = {}
    for (path, slot), samples in samples_of(table).items():
        if path:
            continue  # what a loader yielded, and may not be what the model was given
        for one in samples:
            by_place.setdefault((one.micro_step, one.rank, one.place), {})[slot] = one.fingerprint
    slots = {slot for found in by_place.values() for slot in found}
    shared = [slot for slot in sorted(slots) if all(slot in found for found in by_place.values())]
    return [
        WholeSample(*place, fingerprints=tuple(found[slot] for slot in shared))
        for place, found in sorted(by_place.items())
    ]


def elements_of_a_sample(table: Mapping[Key, Entry]) -> int:
    """How many numbers a sample has, over all inputs; 0 where samples were not observed."""
    first = (entry for key, entry in table.items() if key[:3] == ("batch", "sample", "") and not key.call)
    return sum(int(entry.parts[0].summary["count"]) for entry in first if entry.parts and not entry.unobserved)


def inputs_of(table: Mapping[Key, Entry]) -> list[Entry]:
    """What the model was given in the step's forward passes."""
    return [entry for key, entry in table.items() if key[:3] == ("batch", "", "") and not entry.unobserved]
