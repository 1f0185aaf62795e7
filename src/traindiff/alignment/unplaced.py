"""Parameters that are parts of larger ones on each rank, and that nobody has declared: no copies that disagree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from traindiff.merging.step_table import Entry, Key

_PHASES = ("grad", "optimizer", "update", "param")


def without_unplaced(table: Mapping[Key, Entry], other: Mapping[Key, Entry]) -> dict[Key, Entry]:
    """The table of a step in which parameters are unknown that differ between ranks and have another shape than there.

    Args:
        table: The step in one run.
        other: The step in the other run, which has these parameters whole.
    """
    apart = (entry for entry in table.values() if entry.apart and entry.key.phase != "update")  # replays are by rank
    paths = {entry.key.path for entry in apart if _differs_in_shape(entry, other)}
    return {
        key: _unknown(entry, other[key]) if key.path in paths and _differs_in_shape(entry, other) else entry
        for key, entry in table.items()
    }


def _differs_in_shape(entry: Entry, other: Mapping[Key, Entry]) -> bool:
    there = other.get(entry.key)
    return entry.key.phase in _PHASES and there is not None and there.shape != entry.shape


def _unknown(entry: Entry, other: Entry) -> Entry:
    reason = (
        f"ranks hold different values of shape {list(entry.shape)}, and in the other run it is {list(other.shape)}: "
        f'declare which part each has with record(shards=[traindiff.shard("{entry.key.path}", dim=..., axis=...)])'
    )
    return replace(entry, unobserved=reason, apart=())
