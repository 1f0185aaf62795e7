"""The gradients of a step's weights, and how large their elements are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from traindiff.merging.step_table import Entry, Key
from traindiff.summary import nonfinite_count, norm

FEW = 16
"""Elements below which a tensor is no weight of a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGradient:
    """The gradient of a weight: of a parameter with two axes or more.

    Attributes:
        entry: Of the gradient.
        size: Root mean square of its elements; more than 0.
        place: When in the forward pass its module returned; -1 where it was not observed.
    """

    entry: Entry
    size: float
    place: int

    @property
    def path(self) -> str:
        """Path of the weight."""
        return self.entry.key.path


def weight_gradients(table: Mapping[Key, Entry]) -> list[WeightGradient]:
    """Gradients of weights that are finite and not 0, in the order of the forward pass.

    Biases and norms are left out: those before a normalisation have gradients that are 0 but for rounding.
    """
    places = {key.path: entry.order for key, entry in table.items() if key.phase == "forward" and not key.stage}
    found = []
    for key, entry in table.items():
        if key[:2] != ("grad", "") or entry.unobserved or len(entry.shape) < 2:
            continue
        count, size = int(entry.summary["count"]), float(norm(entry.summary))
        if count < FEW or not size or nonfinite_count(entry.summary):
            continue
        place = places.get(key.path.rpartition(".")[0], -1)
        found.append(WeightGradient(entry=entry, size=size / math.sqrt(count), place=place))
    return sorted(found, key=lambda one: one.place)
