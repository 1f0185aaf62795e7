"""The rows of each step of a recording, and why some steps have none: by this process, or by workers block by block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from traindiff.analyse.blocks.steps import Readers, Source
from traindiff.analyse.compact.merged_rows import RowMaker, Rows, Unmergeable
from traindiff.analyse.merge.merged_tables import MergedTables
from traindiff.analyse.merge.placed_parts import PlacedParts, places_of
from traindiff.analyse.merge.rank_codes import num_bits
from traindiff.analyse.merge.rank_steps import rank_steps
from traindiff.analyse.merge.run_steps import StepContent, StepMerger, shows_call
from traindiff.analyse.merge.site import NAMES, MergedSite, StepTable
from traindiff.analyse.merge.span import Span
from traindiff.analyse.products import product_checks
from traindiff.analyse.rules.products import ROW, WHOLE
from traindiff.errors import CorruptRecordingError
from traindiff.storage import Places, Recording, StepObservations
from traindiff.storage.places import PlaceNumbers

PARTS = "parts of the step are never merged (operators, products, several evaluations of the loss)"
OTHER = "merged rows cannot say all of it"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """A step, merged over its ranks.

    Attributes:
        optimizer: Name of the optimizer.
        step: Number of the step.
        ranks: Number of ranks that have it.
        shown: Whether it has what is recorded when the optimizer was called.
        rows: Its rows; None if it has none.
        places: The lists of places that the rows name, by their `term`.
        reason: Why there are no rows; empty if there are.
    """

    optimizer: str
    step: int
    ranks: int
    shown: bool
    rows: Rows | None
    places: Mapping[int, Places]
    reason: str


class RowsOfSteps:
    """Makes the rows of the steps of a recording.

    Args:
        run: The recording.
        merger: Merges its steps.
    """

    def __init__(self, run: Recording, merger: StepMerger) -> None:
        self._run = run
        self._merger = merger
        self._places = PlaceNumbers()
        self._maker = RowMaker(self._places, num_bits(run.world_size))
        self._described = {rank: run.rank_content(rank).get("products", {}) for rank in run.ranks}

    def of(self, of_ranks: Sequence[StepObservations]) -> StepRows:
        """The rows of a step. One that was merged before is merged again."""
        merged = self._merger.alone(of_ranks)
        parts = of_ranks[0].places is None and self._has_other_parts(merged.content)
        rows = None if parts else self._rows(merged.content.table, optimizer=merged.optimizer, step=merged.step)
        numbers = {one.term for one in rows.observations} if rows else ()
        return StepRows(
            optimizer=merged.optimizer, step=merged.step, ranks=len(merged.ranks),
            shown=shows_call(merged.content.table), rows=rows, reason=PARTS if parts else "" if rows else OTHER,
            places={number: self._places.of(number) for number in numbers},
        )  # fmt: skip

    def _has_other_parts(self, content: StepContent) -> bool:
        return bool(
            content.earlier
            or content.operators
            or content.without_idle is not None
            or self._has_wrong_products(content)
        )

    def _has_wrong_products(self, content: StepContent) -> bool:
        """True if checks of products are to be kept: of operators all, of layers those that are not clearly right."""
        checks = product_checks(content.products, self._described)
        return any(
            not one.is_of_layer or one.not_judged or one.residual > ROW / 2.0 or one.ratio > WHOLE / 2.0
            for one in checks
        )  # half of the rules' limits, as strict as comparisons are

    def _rows(self, table: StepTable, *, optimizer: str, step: int) -> Rows | None:
        """The rows of a step; None if they do not say all of it."""
        try:
            rows = self._maker.rows(table, optimizer=optimizer, step=step)
        except Unmergeable:
            return None
        read = StepObservations(
            rank=self._run.ranks[0], optimizer=optimizer, step=step, observations=rows.observations,
            summaries=rows.numbers, places=self._places,
        )  # fmt: skip
        world_size = self._run.world_size
        try:
            found = MergedTables(world_size, num_bits(world_size), self._run.path).table(read)
        except CorruptRecordingError:  # a reader would refuse them
            return None
        return rows if rows.observations and says_the_same(table, found) else None


def rows_of_block(source: Source, span: Span, before: bool) -> list[StepRows]:  # noqa: FBT001  called by tasks
    """The rows of the steps of a block."""
    readers = Readers.of(source)
    run = readers.recordings[0]
    maker = readers.kept(RowsOfSteps, lambda: RowsOfSteps(run, readers.mergers[0]))
    return list(_rows(maker, rank_steps(run, span, before=before)))


def _rows(maker: RowsOfSteps, steps: Iterator[list[StepObservations]]) -> Iterator[StepRows]:
    for of_ranks in steps:
        yield maker.of(of_ranks)
        of_ranks.clear()


def says_the_same(expected: StepTable, found: StepTable) -> bool:
    """True if two tables are the same: their sites in order, all that is known of them, and the parts that are kept."""
    if list(expected) != list(found):
        return False
    return all(_same(expected[key], found[key]) for key in expected)


_COMPARED = tuple(name for name in NAMES if name not in ("summary", "parts", "abridged"))


def _same(expected: MergedSite, found: MergedSite) -> bool:
    if any(getattr(expected, name) != getattr(found, name) for name in _COMPARED):
        return False
    if _bytes(expected.summary) != _bytes(found.summary):
        return False
    if not isinstance(found.parts, PlacedParts) or (not found.parts.are_known and found.abridged is None):
        return False
    places = tuple((part.micro_step, part.rank, part.shard, part.term) for part in places_of(expected.parts))
    if places != tuple(found.parts.places):
        return False
    known = ((expected.parts[at].summary, summary) for at, summary in found.parts.known.items())
    return all(one is not None and _bytes(one) == _bytes(other) for one, other in known)


def _bytes(summary: Any) -> bytes:
    return bytes(np.asarray(summary).tobytes())
