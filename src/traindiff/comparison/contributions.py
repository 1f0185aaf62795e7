"""What each micro-batch of each rank brought to each gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from traindiff.merging.step_table import Entry, Key
from traindiff.summary import add


def contributions(table: Mapping[Key, Entry]) -> dict[str, dict[tuple[int, int], Any]]:
    """By path: summaries by micro-step and rank; of copies on several ranks one."""
    found: dict[str, dict[tuple[int, int], Any]] = {}
    for key, entry in table.items():
        if key.phase != "grad" or key.stage != "micro" or key.call or entry.unobserved:
            continue
        terms = {(part.micro_step, part.term, part.shard): part for part in reversed(entry.parts)}
        by_place: dict[tuple[int, int], list[Any]] = {}
        for part in terms.values():
            by_place.setdefault((part.micro_step, part.rank), []).append(part.summary)
        found[key.path] = {place: add(parts) for place, parts in sorted(by_place.items())}
    return found
