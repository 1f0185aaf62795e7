"""The norm of all gradients, recomputed from the summaries of both runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from traindiff.merging.distance import Pair
from traindiff.merging.step_table import Entry, Key, scalar_entry
from traindiff.summary import nonfinite_count

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
