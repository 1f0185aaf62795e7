"""The norm of all gradients, recomputed from the summaries of both runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from traindiff.analyse.merge.distance import Pair
from traindiff.analyse.merge.loss_scale import loss_scale
from traindiff.analyse.merge.recorded_calls import clips
from traindiff.analyse.merge.step_table import Entry, Key, scalar_entry
from traindiff.core.summary import nonfinite_count


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


GRADIENT_NORM = Key("grad", "", "(all parameters)", "norm", 0, 0)
"""Where the norm of all parameter gradients, recomputed from their summaries, is filed."""


def gradient_norms(pairs: Iterable[Pair]) -> list[Pair]:
    """The norms of all gradients that both runs' optimizers saw; nothing where there are none."""
    gradients = [pair for pair in pairs if pair.baseline.key.phase == "grad" and not pair.baseline.key.stage]
    if not gradients:
        return []
    return [
        Pair(
            baseline=_norm_of([pair.baseline for pair in gradients]),
            candidate=_norm_of([pair.candidate for pair in gradients]),
        )
    ]


def _norm_of(gradients: Sequence[Entry]) -> Entry:
    bad = any(nonfinite_count(entry.summary) for entry in gradients)
    squares = sum(float(entry.summary["sum_of_squares"]) for entry in gradients)
    value = math.nan if bad else math.sqrt(squares)
    return scalar_entry(GRADIENT_NORM, value, order=max(entry.order for entry in gradients))
