"""Units behind a ReLU that return 0 for every input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from traindiff.findings import Finding
from traindiff.merging.finding_at import finding_at
from traindiff.merging.step_table import Entry, Key
from traindiff.rules.rule import Limit, Rule
from traindiff.shards import BUCKETS, OPEN, Shard

RECTIFIERS = frozenset({"ReLU", "ReLU6"})
"""Modules that return exactly 0 for all negative inputs, and pass no gradient there."""


@dataclass(slots=True, kw_only=True)
class _Layer:
    """What was seen of a layer's units, bucket by bucket of its profile.

    Attributes:
        entry: Its output.
        units: Units in each bucket.
        steps: Steps in a row in which a bucket was all 0.
    """

    entry: Entry
    units: NDArray[np.int64]
    steps: NDArray[np.int64]


class UnitsLive(Rule):
    """Layers behind a `ReLU` module most of whose units return 0 for every sample, in every one of the last steps.

    A unit that is below 0 for all inputs gets no gradient, so it stays there (Lu et al., Dying ReLU, 2019). What is
    kept of a tensor are the largest magnitudes of up to 16 groups of units (profiles, FORMAT.md), so a group counts as
    dead when all of its units are: of a convolution a sixteenth of its channels, of a linear layer 16 units or a
    sixteenth. That misses single dead units, of which a healthy layer has some, and never counts a live one. A ReLU
    that is called as a function is no module, and not seen; nor are GELU, SiLU and others that return next to 0, and
    not 0. Where a whole layer of those is dead, the weights before it get no gradient, which is `no-gradient`.
    """

    name = "dead-units"
    finds = "Most units behind a ReLU return 0 for every sample."
    kinds = ("dead-units",)
    tells_runs_apart = False
    limits: ClassVar[Mapping[str, Limit]] = {
        "share": Limit(default=0.5, says="largest share of a layer's units that may be dead"),
        "least_steps": Limit(default=10, says="steps at the end of the run in which they return nothing but 0"),
    }

    def begin(self) -> None:
        """See `Rule.begin`."""
        self._layers: dict[Key, _Layer] = {}
        self._last_step = 0

    def step(self, table: Mapping[Key, Entry], *, step: int) -> tuple[Finding, ...]:
        """Takes note of the step."""
        self._last_step = step
        for key, entry in table.items():
            if key.phase != "forward" or key.stage or self.facts.modules.get(key.path) not in RECTIFIERS:
                continue
            if entry.unobserved or not entry.batched or len(entry.shape) < 2:
                continue
            layer = self._layers.get(key)
            if layer is None:
                zeros = np.zeros(BUCKETS, dtype=np.int64)
                layer = self._layers[key] = _Layer(entry=entry.without_parts(), units=_units(entry.shape), steps=zeros)
            layer.steps = np.where(_largest(entry) == 0.0, layer.steps + 1, 0)
        return ()

    def end(self) -> Iterator[Finding]:
        """See the class."""
        for layer in self._layers.values():
            dead = int(layer.units[layer.steps >= self.limit("least_steps")].sum())
            units = int(layer.units.sum())
            if not dead or dead <= self.limit("share") * units:
                continue
            path = layer.entry.key.path
            num_steps = int(layer.steps[layer.steps >= self.limit("least_steps")].min())
            says = (
                f"At least {dead} of {units} units of {path} are dead: they return 0 for every sample in the last "
                f"{num_steps} steps, and get no gradient. Lower the learning rate, look at biases far below 0, or use "
                "LeakyReLU, GELU or normalisation."
            )
            evidence = {"dead": dead, "units": units, "num_steps": num_steps}
            yield finding_at(
                layer.entry,
                step=max(0, self._last_step - num_steps + 1),
                kind="dead-units",
                says=says,
                evidence=evidence,
            )


def _by_rows(shape: tuple[int, ...]) -> bool:
    """Whether the units are on axis 1 (channels of an image), or on the last one (features)."""
    return len(shape) > 3


def _units(shape: tuple[int, ...]) -> NDArray[np.int64]:
    """Units in each bucket of the profile."""
    grid = Shard(shape=shape, global_shape=(OPEN, *shape[1:]), offset=(0,) * len(shape)).grid
    numbers: NDArray[Any]
    if _by_rows(shape):
        numbers = np.arange(shape[1]) // grid.row_block % BUCKETS
    else:
        numbers = np.arange(grid.columns) // grid.column_block
    return np.bincount(numbers, minlength=BUCKETS)


def _largest(entry: Entry) -> NDArray[np.float64]:
    return np.asarray(entry.summary["row_largest" if _by_rows(entry.shape) else "column_largest"])
