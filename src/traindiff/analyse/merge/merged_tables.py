"""The tables of merged steps of a compact recording: read as they were when their ranks were merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from traindiff.analyse.merge.placed_parts import Abridged, PlacedParts
from traindiff.analyse.merge.rank_codes import WIDTH
from traindiff.analyse.merge.site import NAMES, MergedSite, SiteKey, filled
from traindiff.core.observation import Observation
from traindiff.core.untrusted.demands import damaged
from traindiff.storage import Places, StepObservations
from traindiff.storage.merged_rows import ENTRY, MICRO_STEP, PART, RANKS, groups_in, numbers_in
from traindiff.storage.schema import Malformed

_SUMMARY, _PARTS, _ABRIDGED = (NAMES.index(name) for name in ("summary", "parts", "abridged"))
_MOST_KNOWN = 2
"""Some steps of a training have further sites, or another optimizer's."""


@dataclass(slots=True, kw_only=True)
class _Planned:
    """An entry of which only the numbers change from step to step.

    Attributes:
        row: The row with its numbers.
        values: Fields of the entry; None in place of what has numbers.
        places: Where its parts are.
        alike: Whether all parts have the numbers of the whole.
        kept: Rows with numbers of parts, by position of the part.
        ranks: The row that tells of its ranks; None without one.
        micro_steps: Rows with the sums of micro-steps, by their number.
    """

    row: int
    values: list[Any]
    places: Places
    alike: bool
    kept: dict[int, int] = field(default_factory=dict)
    ranks: int | None = None
    micro_steps: dict[int, int] = field(default_factory=dict)

    def entry(self, rows: Sequence[Any], bits: int) -> MergedSite:
        """The entry with the numbers of one step."""
        summary = rows[self.row]
        values = list(self.values)
        values[_SUMMARY] = summary
        kept = {at: rows[row] for at, row in self.kept.items()}
        parts = values[_PARTS] = PlacedParts(self.places, alike=summary if self.alike else None, kept=kept)
        if self.ranks is not None and not parts.are_known:
            told = rows[self.ranks]
            values[_ABRIDGED] = Abridged(
                codes=told["sketch"].reshape(-1, WIDTH)[:bits] if bits else None,
                terms=int(told["fingerprint"]),
                micro_steps={number: rows[row] for number, row in self.micro_steps.items()},
            )
        return filled(values)


class MergedTables:
    """Makes the tables of a run's merged steps.

    Args:
        world_size: Number of ranks of the run.
        bits: Number of codes of a site; see `traindiff.analyse.merge.rank_codes`.
        where: The recording, for messages.
    """

    def __init__(self, world_size: int, bits: int, where: str) -> None:
        self._where = where
        self._world_size = world_size
        self._bits = bits
        self._known: list[tuple[object, list[_Planned]]] = []  # the latest first

    def table(self, step: StepObservations) -> dict[SiteKey, MergedSite]:
        """The table of a merged step.

        Raises:
            CorruptRecordingError: Its rows are not those of a merged step.
        """
        plan = next((plan for layout, plan in self._known if layout is step.layout and layout is not None), None)
        if plan is None:
            try:
                plan = _plan(step, self._world_size)
            except Malformed as malformed:
                raise damaged(self._where, f"merged step {step.step} is malformed: {malformed}") from None
            self._known = [(step.layout, plan), *self._known][:_MOST_KNOWN]
        rows = list(step.summaries)
        entries = [one.entry(rows, self._bits) for one in plan]
        return {entry.key: entry for entry in entries}


def _plan(step: StepObservations, world_size: int) -> list[_Planned]:
    planned: dict[int, _Planned] = {}
    for row, seen in enumerate(step.observations):
        if seen.evaluation == ENTRY:
            planned[row] = _planned(row, seen, step)
        elif (owner := planned.get(seen.order)) is None:
            raise Malformed(f"row {row} belongs to no site")
        elif seen.evaluation == RANKS:
            owner.ranks = row
            owner.values[_APART] = groups_in(seen.slot, world_size, len(owner.places))
            owner.values[_SPREAD] = seen.weight
        elif seen.evaluation == PART:
            owner.kept |= dict.fromkeys(numbers_in(seen.slot, len(owner.places), len(owner.places)), row)
        elif seen.evaluation == MICRO_STEP:
            owner.micro_steps[seen.micro_step] = row
        else:
            raise Malformed(f"row {row} is of no kind that a merged step has")
    return list(planned.values())


_APART, _SPREAD = NAMES.index("apart"), NAMES.index("spread")


def _planned(row: int, seen: Observation, step: StepObservations) -> _Planned:
    assert step.places is not None
    summed = seen.merge != "shard"
    about: Mapping[str, Any] = {
        "key": SiteKey(seen.phase, seen.stage, seen.path, seen.slot, seen.call, seen.micro_step),
        "order": seen.order, "dtype": seen.dtype, "shape": seen.shard.shape, "exact": not seen.scaled,
        "unobserved": seen.unobserved, "factor": seen.factor, "apart": (), "spread": 0.0,
        "batched": seen.shard.batched, "summed": summed, "placed": True, "origin": (),
    }  # fmt: skip
    return _Planned(
        row=row, values=[about.get(name) for name in NAMES], places=step.places.of(seen.term), alike=seen.weight == 1.0
    )
