"""Merged steps as they are sent from one process to another: all numbers in one array, and everything else as bytes.

The parts of a site become `PlacedParts` of which all numbers are known, so that those of a thousand ranks cost nothing
until somebody asks for them.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from traindiff.analyse.merge.placed_parts import PlacedParts, RankPart
from traindiff.analyse.merge.run_steps import Evaluation, MergedAlone, StepContent
from traindiff.analyse.merge.site import NAMES, MergedSite, Part, filled
from traindiff.core.observation import Observation
from traindiff.core.shards import Shard
from traindiff.core.summary import SUMMARY, Summaries
from traindiff.storage.places import Place, Places

_SUMMARY, _PARTS = NAMES.index("summary"), NAMES.index("parts")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSteps:
    """Steps of several runs.

    Attributes:
        about: By run: optimizer, number, and the steps before; None for a run without the step.
        numbers: All different summaries.
        rest: Everything else. Equal for steps with the same sites and parts.
    """

    about: tuple[tuple[str, int, Mapping[str, int]] | None, ...]
    numbers: Summaries
    rest: bytes


class Packer:
    """Packs steps. Parts at the same places share one list of them."""

    def __init__(self) -> None:
        self._places = _PlaceLists()

    def packed(self, steps: Sequence[MergedAlone | None]) -> PackedSteps:
        """Steps of several runs, which may share entries."""
        packing = _Packing(self._places)
        contents = [None if one is None else packing.content(one) for one in steps]
        return PackedSteps(
            about=tuple(None if one is None else (one.optimizer, one.step, one.after) for one in steps),
            numbers=packing.numbers(),
            rest=pickle.dumps((packing.entries, contents), protocol=5),
        )


class _PlaceLists:
    """Lists of places, the same object for parts at the same places.

    Steps of a training mostly have the same objects as shards, so that lists are found by these. They are kept, so
    that no other object has the place of one in memory.
    """

    def __init__(self) -> None:
        self._by_content: dict[tuple[Place, ...], Places] = {}
        self._by_objects: dict[tuple[tuple[int, int, int, int], ...], tuple[Places, list[Shard]]] = {}

    def of(self, parts: Sequence[RankPart]) -> Places:
        """Where parts are."""
        key = tuple([(part.micro_step, part.rank, id(part.shard), part.term) for part in parts])
        if key not in self._by_objects:
            if len(self._by_objects) >= _MOST_LISTS:
                self._by_objects.clear()
                self._by_content.clear()
            places = Places(Place(part.micro_step, part.rank, part.shard, part.term) for part in parts)
            self._by_objects[key] = self._by_content.setdefault(places, places), [part.shard for part in parts]
        return self._by_objects[key][0]


_MOST_LISTS = 1 << 12
"""As many as sites have, in a few kinds of steps."""

_Row = int
"""A row of the numbers; the complement of one if the summary is an array without axes."""


class _Packing:
    """Replaces summaries by their rows, and entries by their numbers. All steps that are packed must be kept."""

    def __init__(self, places: _PlaceLists) -> None:
        self.entries: list[list[Any]] = []  # fields, with rows in place of summaries
        self._places = places
        self._summaries: list[Any] = []
        self._rows: dict[int, int] = {}  # by the id of a summary
        self._entries: dict[int, int] = {}  # by the id of an entry

    def numbers(self) -> Summaries:
        """All different summaries."""
        found = np.empty(len(self._summaries), dtype=SUMMARY)
        for row, summary in enumerate(self._summaries):
            found[row] = summary
        return found

    def content(self, step: MergedAlone) -> Mapping[str, Any]:
        """Everything but the numbers of a step and those before it."""
        content, idle = step.content, step.content.without_idle
        return {
            "table": self._table(content.table),
            "earlier": self._evaluations(content.earlier),
            "operators": [self._part(one) for one in content.operators],
            "products": [self._part(one) for one in content.products],
            "without_idle": idle and (self._evaluations(idle[0]), self._table(idle[1])),
            "is_planned": content.layout is not None,
            "finite": content.finite,
            "ranks": step.ranks,
            "last": {rank: seen._replace(step=0) for rank, seen in step.last.items()},
        }

    def _evaluations(self, earlier: Sequence[Evaluation]) -> list[tuple[Any, Any]]:
        return [(self._table(one.table), self._table(one.moved)) for one in earlier]

    def _table(self, table: Mapping[Any, MergedSite]) -> list[tuple[Any, int]]:
        return [(key, self._entry(entry)) for key, entry in table.items()]

    def _entry(self, entry: MergedSite) -> int:
        number = self._entries.get(id(entry))
        if number is None:
            number = self._entries[id(entry)] = len(self.entries)
            values = [getattr(entry, name) for name in NAMES]
            values[_SUMMARY] = self._row(entry.summary)
            rows = [self._row(part.summary) for part in entry.parts]
            together = range(rows[0], rows[0] + len(rows)) if rows else ()
            values[_PARTS] = self._places.of(entry.parts), together if rows == list(together) else rows
            self.entries.append(values)
        return number

    def _row(self, summary: Any) -> _Row:
        row = self._rows.get(id(summary))
        if row is None:
            row = self._rows[id(summary)] = len(self._summaries)
            self._summaries.append(summary)
        return row if isinstance(summary, np.void) else ~row

    def _part(self, part: Part) -> tuple[Observation, int, _Row]:
        seen, rank, summary = part
        return seen._replace(step=0), rank, self._row(summary)


class Unpacker:
    """The inverse of `Packer`, for the steps of all processes."""

    def __init__(self) -> None:
        self._layouts: dict[bytes, object] = {}  # the latest last

    def unpacked(self, packed: PackedSteps) -> list[MergedAlone | None]:
        """The steps. Entries that runs shared are shared again."""
        fields, contents = pickle.loads(packed.rest)
        entries = [_filled(values, packed.numbers) for values in fields]
        layout = self._layout(packed.rest)
        return [
            about and _merged(about, content, entries, packed.numbers, layout)
            for about, content in zip(packed.about, contents, strict=True)
        ]

    def _layout(self, rest: bytes) -> object:
        """The same object for steps of which everything but the numbers is the same."""
        digest = hashlib.sha256(rest).digest()
        layout = self._layouts.pop(digest, None) or object()
        self._layouts[digest] = layout
        if len(self._layouts) > _MOST_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        return layout


_MOST_LAYOUTS = 8


def _merged(
    about: tuple[str, int, Mapping[str, int]], content: Mapping[str, Any], entries: Sequence[MergedSite],
    numbers: Summaries, layout: object,
) -> MergedAlone:  # fmt: skip
    optimizer, step, after = about

    def table(packed: Sequence[tuple[Any, int]]) -> dict[Any, MergedSite]:
        return {key: entries[number] for key, number in packed}

    def evaluations(packed: Sequence[tuple[Any, Any]]) -> list[Evaluation]:
        return [Evaluation(table=table(sites), moved=table(moved)) for sites, moved in packed]

    def parts(packed: Sequence[tuple[Observation, int, _Row]]) -> list[Part]:
        return [(seen._replace(step=step), rank, _summary(numbers, row)) for seen, rank, row in packed]

    idle = content["without_idle"]
    return MergedAlone(
        optimizer=optimizer, step=step, after=after, ranks=content["ranks"],
        last={rank: seen._replace(step=step) for rank, seen in content["last"].items()},
        content=StepContent(
            table=table(content["table"]), earlier=evaluations(content["earlier"]),
            operators=parts(content["operators"]), products=parts(content["products"]),
            without_idle=idle and (evaluations(idle[0]), table(idle[1])),
            layout=layout if content["is_planned"] else None, finite=content["finite"],
        ),
    )  # fmt: skip


def _filled(values: list[Any], numbers: Summaries) -> MergedSite:
    places, rows = values[_PARTS]
    values[_SUMMARY] = _summary(numbers, values[_SUMMARY])
    values[_PARTS] = PlacedParts(places, kept=_Rows(numbers, rows)) if places else ()
    return filled(values)


def _summary(numbers: Summaries, row: _Row) -> Any:
    return numbers[row] if row >= 0 else numbers[~row : ~row + 1].reshape(())


class _Rows(Mapping[int, Any]):
    """The numbers of the parts of a site, by position."""

    __slots__ = ("_numbers", "_rows")

    def __init__(self, numbers: Summaries, rows: Sequence[_Row]) -> None:
        self._numbers = numbers
        self._rows = rows

    def __getitem__(self, at: int) -> Any:
        if not 0 <= at < len(self._rows):
            raise KeyError(at)
        return _summary(self._numbers, self._rows[at])

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._rows)))
