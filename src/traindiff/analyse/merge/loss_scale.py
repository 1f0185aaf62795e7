"""Loss scales: what they multiply is divided by them before it is compared, whatever they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from traindiff.core.observation import LOSS_SCALE
from traindiff.core.summary import number

if TYPE_CHECKING:
    from traindiff.analyse.merge.step_table import Entry, Key, Part

UNKNOWN = "it is multiplied by a loss scale that was not observed"
"""Why there are no numbers of what cannot be divided by its loss scale."""


def unscaled(parts: Iterable[Part]) -> Iterator[Part]:
    """The observations of a step, with the loss scale as a part of the factor of those that are scaled."""
    parts = list(parts)
    scales: dict[int, dict[int, float]] = {}
    for seen, rank, summary in parts:
        if (seen.phase, seen.path) == ("loss", LOSS_SCALE) and not seen.unobserved:
            scales.setdefault(rank, {})[seen.micro_step] = number(summary)
    for seen, rank, summary in parts:
        if not seen.scaled or seen.unobserved:
            yield seen, rank, summary
        elif scale := _scale_at(scales, rank, seen.micro_step):
            yield replace(seen, factor=seen.factor * scale), rank, summary
        else:
            yield replace(seen, unobserved=UNKNOWN), rank, summary


def _scale_at(scales: Mapping[int, Mapping[int, float]], rank: int, micro_step: int) -> float | None:
    """The scale of a rank's micro-step, or the latest before it: it changes between steps only."""
    own = scales.get(rank, {})
    before = [number for number in own if number <= micro_step]
    if before:
        return own[max(before)]
    return next((scale for other in scales.values() for scale in other.values()), None)


def is_loss_scale(key: Key) -> bool:
    """Whether this is the scale itself, which no two runs need to share."""
    return (key.phase, key.path) == ("loss", LOSS_SCALE)


def loss_scale(table: Mapping[Key, Entry]) -> float:
    """The loss scale of a step; 1 without one."""
    found = (number(entry.summary) for key, entry in table.items() if is_loss_scale(key) and not entry.unobserved)
    return next(found, 0.0) or 1.0
