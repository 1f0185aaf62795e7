"""Stages of gradients that a run did not need to record apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from traindiff.merging.clips import clips
from traindiff.merging.loss_scale import loss_scale
from traindiff.merging.step_table import Entry, Key


def with_gradient_stages(table: Mapping[Key, Entry], other: Mapping[Key, Entry], *, asked: bool) -> dict[Key, Entry]:
    """The table with those stages of gradients that the other run has: what nothing has changed is what came next.

    Args:
        table: A run's step.
        other: The same step of the other run.
        asked: Whether the run was asked to record the stages; if not, gradients before clipping are not known.
    """
    has_scale, result = loss_scale(table) != 1.0, dict(table)
    seen = [entry.order for key, entry in table.items() if key[:2] == ("grad", "")]
    if not seen or (not asked and (has_scale or clips(table))):
        return result
    for key in other:
        if key.phase != "grad" or key.stage not in ("reduced", "unscaled") or key in table:
            continue
        before = table.get(key._replace(stage="reduced")) if key.stage == "unscaled" and not has_scale else None
        held = before or table.get(key._replace(stage=""))
        if held is not None:
            result[key] = replace(held, key=key, order=min(seen) - 1)
    return result
