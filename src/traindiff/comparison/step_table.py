"""Merge the observations of a step, over ranks and micro-steps, into one entry per site."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from traindiff.observation import Observation
from traindiff.shard import OPEN
from traindiff.summary import add, empty, merge

_AFTER_ALL = 1 << 40
"""Added to the order of scalars that the training logged: they follow from what it computed, and nothing from them."""

_GROUP = re.compile(r"(.*)\.groups\[(\d+)\]")


class Key(NamedTuple):
    """What makes two observations of two runs the same one."""

    phase: str
    stage: str
    path: str
    slot: str
    call: int
    micro_step: int  # 0 for what merges over micro-steps

    @property
    def group(self) -> tuple[str, int] | None:
        """Optimizer and number of the parameter group, if this is a setting of one."""
        match = _GROUP.fullmatch(self.path) if self.phase == "optimizer" else None
        return (match[1], int(match[2])) if match else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One site in one step, merged.

    Attributes:
        key: Its identity.
        order: Place in execution order, of its first part; of what was logged, behind everything else.
        dtype: Dtype of its parts.
        shape: Global shape; the batch axis has the rows of all micro-steps.
        summary: The merged summary.
        exact: Whether fingerprints, counts and norms are of the tensor itself (not of a sum of
            partial observations, of which only the linear parts are known).
        parts: Micro-step, rank and summary of each part, in the order of execution.
        unobserved: Why there are no numbers.
    """

    key: Key
    order: int
    dtype: str
    shape: tuple[int, ...]
    summary: Any
    exact: bool = True
    parts: tuple[tuple[int, int, Any], ...] = ()
    unobserved: str = ""


Part = tuple[Observation, int, Any]
"""An observation, its rank, its summary."""


def step_table(parts: Iterable[Part]) -> dict[Key, Entry]:
    """Entries of one step by key, in execution order."""
    by_site: dict[Key, list[Part]] = {}
    for part in parts:
        seen = part[0]
        key = Key(seen.phase, seen.stage, seen.path, seen.slot, seen.call, 0)
        by_site.setdefault(key, []).append(part)
    entries = [entry for key, same in by_site.items() for entry in _merged(key, same)]
    entries.sort(key=lambda entry: entry.order)
    return {entry.key: entry for entry in entries}


def scalar_entry(key: Key, value: float, *, order: int) -> Entry:
    """An entry for a number that was derived, e.g. a norm over several sites."""
    summary = empty()
    summary["count"] = 1
    summary["nan"] = math.isnan(value)
    value = 0.0 if math.isnan(value) else value
    summary["minimum"] = summary["maximum"] = summary["sum"] = value
    summary["sum_of_squares"] = value * value
    summary["sketch"][0] = value
    return Entry(key=key, order=order, dtype="float64", shape=(), summary=summary[()], exact=False)


def _merged(key: Key, parts: list[Part]) -> list[Entry]:
    parts.sort(key=lambda part: (part[0].micro_step, part[1], part[0].order))
    first = parts[0][0]
    missing = next((seen.unobserved for seen, _, _ in parts if seen.unobserved), "")
    if missing:
        return [_entry(key, parts, summary=empty(), shape=(), unobserved=missing)]
    if len(parts) == 1 and first.merge != "mean":
        return [_entry(key, parts, summary=parts[0][2], shape=_rows_known(parts))]
    summaries = [summary for _, _, summary in parts]
    if first.merge == "sum":
        return [_entry(key, parts, summary=add(summaries), shape=first.shard.shape, exact=False)]
    if first.merge == "mean":
        weights = np.array([seen.weight for seen, _, _ in parts])
        total = weights.sum() or 1.0
        return [_entry(key, parts, summary=add(summaries, weights / total), shape=first.shard.shape, exact=False)]
    if first.shard.batched:
        return [_entry(key, parts, summary=merge(summaries), shape=_rows_known(parts))]
    return _per_micro_step(key, parts)


def _per_micro_step(key: Key, parts: list[Part]) -> list[Entry]:
    """A whole tensor in each of several micro-steps: one entry if it never changes, else one each."""
    fingerprints = {int(summary["fingerprint"]) for _, _, summary in parts}
    if len(fingerprints) == 1:
        parts = parts[:1]
    return [
        _entry(key._replace(micro_step=number), [part], summary=part[2], shape=part[0].shard.global_shape)
        for number, part in enumerate(parts)
    ]


def _rows_known(parts: Sequence[Part]) -> tuple[int, ...]:
    shard = parts[0][0].shard
    if not shard.batched:
        return shard.global_shape
    rows = sum(seen.shard.shape[0] for seen, _, _ in parts)
    return tuple(rows if length == OPEN else length for length in shard.global_shape)


def _entry(
    key: Key,
    parts: Sequence[Part],
    *,
    summary: Any,
    shape: tuple[int, ...],
    exact: bool = True,
    unobserved: str = "",
) -> Entry:
    first = parts[0][0]
    logged = first.phase == "loss" and first.slot == "logged"
    return Entry(
        key=key,
        order=first.order + (_AFTER_ALL if logged else 0),
        dtype=first.dtype,
        shape=shape,
        summary=summary,
        exact=exact,
        parts=tuple((seen.micro_step, rank, one) for seen, rank, one in parts),
        unobserved=unobserved,
    )
