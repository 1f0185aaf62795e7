"""Activations whose shapes differ in dims of length 1 alone: `[1, 24, 64]` and `[24, 64]` have the same elements."""

from __future__ import annotations

from dataclasses import replace

from traindiff.analyse.align.side import Tables
from traindiff.analyse.findings import more_text
from traindiff.core.site import label

Shape = tuple[int, ...]


class SingletonDims:
    """Brings such activations together, and remembers them.

    Attributes:
        sites: The shapes in both runs, by the name of the site.
    """

    def __init__(self) -> None:
        self.sites: dict[str, tuple[Shape, Shape]] = {}

    def without(self, tables: Tables) -> Tables:
        """Both tables, the candidate's with the baseline's shapes. Elements are numbered in the same order in both."""
        baseline, candidate = tables
        found = {}
        for key, entry in candidate.items():
            other = baseline.get(key)
            if other is None or entry.shape == other.shape or key.phase not in ("forward", "backward"):
                continue
            if _longer(entry.shape) == _longer(other.shape):
                found[key] = replace(entry, shape=other.shape)
                self.sites.setdefault(label(key.path, key.slot), (other.shape, entry.shape))
        return (baseline, {**candidate, **found}) if found else tables

    def note(self) -> str:
        """A sentence about them; empty if there are none."""
        if not self.sites:
            return ""
        name, (baseline, candidate) = next(iter(self.sites.items()))
        also = more_text(len(self.sites) - 1, "site", before=", likewise")
        return (
            f"{name} has the shape {list(baseline)} in the baseline and {list(candidate)} in the candidate{also}: the "
            "same elements, which were compared. Where such a tensor meets another one, it may be broadcast otherwise."
        )


def _longer(shape: Shape) -> list[int]:
    return [one for one in shape if one != 1]
