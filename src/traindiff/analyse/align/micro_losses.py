"""Losses that a model returns, combined over the micro-batches of a step as its gradients combine them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from traindiff.analyse.align.side import Tables
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable, derived_number
from traindiff.core.summary import number


def with_combined_losses(tables: Tables) -> Tables:
    """The tables of a step that the two runs divide into different numbers of micro-batches.

    A training may return the mean over each micro-batch and divide it by their number, or return each micro-batch's
    share of a sum. The gradient of the loss tells: a step minimizes the sum of each loss times its gradient. So a
    scalar that a module returns becomes this sum in both runs. Its gradients are used up in it, and left out.
    """
    losses = [_losses(table) for table in tables]
    both = losses[0].keys() & losses[1].keys()
    if not both:
        return tables
    baseline, candidate = (
        {
            key: found[key] if key in both else entry
            for key, entry in table.items()
            if key.phase != "backward" or key._replace(phase="forward", micro_step=0) not in both
        }
        for table, found in zip(tables, losses, strict=True)
    )
    return baseline, candidate


def _losses(table: StepTable) -> dict[SiteKey, MergedSite]:
    """The scalars that modules return, each as the sum of its values times their gradients, if these are known."""
    found = {}
    for key, entry in table.items():
        if key.phase != "forward" or key.stage or entry.shape or entry.unobserved or not entry.summed:
            continue
        gradients = dict(_gradients(table, key))
        parts = {(part.micro_step, part.term): number(part.summary) for part in entry.parts}
        by_micro_step = {step: gradient for (step, _), gradient in gradients.items()}
        terms = [
            value * gradients.get((step, term), by_micro_step.get(step, math.nan))
            for (step, term), value in parts.items()
        ]
        if terms and math.isfinite(total := sum(terms)):
            found[key] = replace(entry, summary=derived_number(total), exact=False)
    return found


def _gradients(table: StepTable, key: SiteKey) -> Iterator[tuple[tuple[int, int], float]]:
    """Gradients of a scalar by micro-step and term."""
    for other, entry in table.items():
        if other._replace(phase="forward", micro_step=0) == key and other.phase == "backward" and not entry.unobserved:
            yield from (((part.micro_step, part.term), number(part.summary)) for part in entry.parts)
