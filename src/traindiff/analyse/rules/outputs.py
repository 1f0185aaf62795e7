"""What the model returns, over all samples of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.indexed import sites
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable
from traindiff.analyse.rules.batches import inputs_of
from traindiff.analyse.rules.rule import Contents, Limit, Rule
from traindiff.core.shards import OPEN, Shard
from traindiff.core.site import label
from traindiff.core.summary import UNIT_ROUNDOFF, nonfinite_count, rounding

LEAST_ROWS = 4
"""Rows of the profile below which they may well be alike."""

_PRODUCTS = ("Linear", "Conv1d", "Conv2d", "Conv3d")


class OutputsDiffer(Rule):
    """In one step the model's output is the same in all rows, and in the steps before it was not.

    The rows of an output [batch, ..., features] are samples, or positions of a sequence. If the activations between two
    layers are lost (a failed copy to another device leaves zeros), everything behind them is the same in all rows. The
    finding names the first module in execution order whose output became so. The rule compares the norms and the
    largest elements of up to 16 groups of rows (profiles, FORMAT.md), which must agree within rounding (in short
    dtypes, to the bit). To be sure that an output is not merely saturated, it also asks that a layer with a weight,
    behind that module, returns the same in all rows. A model whose units have all died looks the same from then on; the
    rule only warns.
    """

    name = "constant-output"
    finds = "The model suddenly returns the same for all samples."
    needs = "outputs of the model for several samples"
    warns = True
    limits: ClassVar[Mapping[str, Limit]] = {
        "least_steps": Limit(default=3, message="steps before, in which outputs must have differed"),
    }

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return any(not key.path and _has_rows(entry) for key, entry in sites(contents.table, "forward", stage=""))

    def begin(self) -> None:
        """Nothing was seen so far."""
        self._varied = 0
        self._always: set[SiteKey] = set()
        self._was_constant = False

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """Findings of a step."""
        outputs = [entry for key, entry in sites(table, "forward", stage="") if not key.path and _has_rows(entry)]
        if not outputs:
            return
        if not all(map(is_constant, outputs)):
            if self._varied < self.limit("least_steps"):
                self._always.update(one.key for one in _constant_modules(table))
            self._varied += 1
            self._was_constant = False
            return
        was_constant, self._was_constant = self._was_constant, True
        if was_constant or self._varied < self.limit("least_steps") or not _batch_varies(table):
            return
        fresh = [one for one in _constant_modules(table) if one.key not in self._always and one.key.path]
        if not fresh:
            return
        first, *behind = sorted(fresh, key=lambda one: one.order)
        if not any(self.facts.modules.get(one.key.path, "").endswith(_PRODUCTS) for one in behind):
            return
        what = "zero" if _is_zero(first) else "the same in all rows"
        message = (
            f"The model returns the same for all samples, and in the {self._varied} steps before it did not. The first "
            f"output that is {what} is {label(first.key.path, first.key.slot)}. If a copy between devices precedes it, "
            "look at whether that fails; else look for units that have died, and for a mask that hides everything."
        )
        yield self.finding(first, message, step=step, zero=_is_zero(first), num_steps_before=self._varied)


def _has_rows(entry: MergedSite) -> bool:
    return (
        not entry.unobserved
        and entry.exact
        and entry.batched
        and len(entry.shape) >= 2
        and entry.dtype in UNIT_ROUNDOFF
        and not nonfinite_count(entry.summary)
    )


def is_constant(entry: MergedSite) -> bool:
    """True if all rows of the profile have the same norm and the same largest element, or all elements are zero."""
    if _is_zero(entry):
        return True
    shape = entry.shape
    grid = Shard(shape=shape, global_shape=(OPEN, *shape[1:]), offset=(0,) * len(shape)).grid
    rows = int(entry.summary["count"]) // grid.columns
    numbers = np.bincount(np.arange(rows) // grid.row_block % len(entry.summary["row_squares"]))
    held = numbers > 0
    if rows < LEAST_ROWS or held.sum() < LEAST_ROWS:
        return False
    allowed = rounding(entry.dtype) if UNIT_ROUNDOFF[entry.dtype] <= UNIT_ROUNDOFF["float32"] else 0.0
    squares = np.asarray(entry.summary["row_squares"])[: len(numbers)][held] / numbers[held]
    largest = np.asarray(entry.summary["row_largest"])[: len(numbers)][held]
    return all(bool(one.max() - one.min() <= 2.0 * allowed * one.max()) for one in (squares, largest))


def _is_zero(entry: MergedSite) -> bool:
    return 0 < int(entry.summary["zero"]) == int(entry.summary["count"])


def _constant_modules(table: StepTable) -> Iterator[MergedSite]:
    return (entry for _, entry in sites(table, "forward", stage="") if _has_rows(entry) and is_constant(entry))


def _batch_varies(table: StepTable) -> bool:
    """True if an input of the model is known to hold more than one number."""
    return any(float(one.summary["minimum"]) < float(one.summary["maximum"]) for one in inputs_of(table))
