"""Entries that follow from others: updates of parameters, and the norm of all gradients."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from traindiff.comparison.alignment import Pair
from traindiff.comparison.step_table import Entry, Key, scalar_entry
from traindiff.summary import add, nonfinite_count

GRADIENT_NORM = Key("grad", "", "(all parameters)", "norm", 0, 0)
"""Where the norm of all parameter gradients, recomputed from their summaries, is filed."""


LINEAR_STATE = frozenset({"momentum_buffer", "step"})
"""State slots of optimizers whose update is linear in the gradient."""

FIRST_MOMENTS = frozenset({"exp_avg", *LINEAR_STATE})
"""State slots that are linear in the gradient; others hold squares of it."""


def is_quotient(key: Key, adaptive: Collection[str]) -> bool:
    """Whether this is something that an optimizer has divided by a moment: an update, or a state that adds up updates.

    Args:
        key: Of the site.
        adaptive: Parameters whose optimizer keeps a moment that it divides by.
    """
    if key.path not in adaptive:
        return False
    # RMSprop's momentum is over what was divided, and so is what Adadelta accumulates.
    return key.phase in ("update", "param") or (
        key.phase == "optimizer" and key.slot in ("momentum_buffer", "acc_delta")
    )


def adaptive_parameters(keys: Iterable[Key]) -> set[str]:
    """Parameters whose optimizer keeps a moment that it divides by."""
    return {key.path for key in keys if key.phase == "optimizer" and key.slot not in LINEAR_STATE and not key.group}


class Updates:
    """Derives what each step did to each parameter, from the parameters before and after it.

    An update is the difference of two tensors, so its sketch is the difference of two sketches; in
    float64 that leaves about ten digits of an update a millionth the size of its parameter.
    """

    def __init__(self) -> None:
        self._parameters: dict[str, Entry] = {}
        self._ended: dict[str, int] = {}  # by path: the step at whose end a parameter was last seen

    def derive(self, table: dict[Key, Entry], *, step: int) -> tuple[list[Entry], dict[str, Entry]]:
        """Entries of phase `update`, and the parameters as this step found them, by path."""
        for key, entry in table.items():
            if key.phase == "param" and key.stage == "before" and key.slot == "value":
                self._parameters[key.path] = replace(entry, parts=())  # which would keep the whole step in memory
                self._ended.pop(key.path, None)
        # What some ranks have not recorded is unknown, and so is what becomes of it.
        before = {path: entry for path, entry in self._parameters.items() if not entry.unobserved}
        found: list[Entry] = []
        for key, entry in table.items():
            if key.phase != "param" or key.stage or key.slot != "value":
                continue
            old = before.get(key.path)
            if (
                old is not None
                and not entry.unobserved
                and old.shape == entry.shape
                and self._ended.get(key.path, step - 1) == step - 1
            ):
                found.append(_update(key, old, entry))
            self._parameters[key.path] = replace(entry, parts=())
            self._ended[key.path] = step
        return found, before


def _update(key: Key, before: Entry, after: Entry) -> Entry:
    same = before.exact and after.exact and before.summary["fingerprint"] == after.summary["fingerprint"]
    summary: Any = add([after.summary, before.summary], [1.0, -1.0])
    if same:
        summary = add([after.summary], [0.0])
    return Entry(
        key=Key("update", "", key.path, "update", 0, 0),
        order=after.order,
        dtype=after.dtype,
        shape=after.shape,
        summary=summary,
        exact=False,
    )


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
