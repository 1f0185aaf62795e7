"""Losses that a model returns, combined over the micro-batches of a step as its gradients combine them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from traindiff.analyse.align.side import Tables
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable
from traindiff.core.summary import empty, number


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
            key: found.get(key, entry)
            for key, entry in table.items()
            if key._replace(phase="forward", micro_step=0) not in both or key.phase != "backward"
        }
        for table, found in (
            (table, {key: one[key] for key in both}) for table, one in zip(tables, losses, strict=True)
        )
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
            found[key] = _scalar(entry, total)
    return found


def _gradients(table: StepTable, key: SiteKey) -> Iterator[tuple[tuple[int, int], float]]:
    """Gradients of a scalar by micro-step and term."""
    for other, entry in table.items():
        if other._replace(phase="forward", micro_step=0) == key and other.phase == "backward" and not entry.unobserved:
            yield from (((part.micro_step, part.term), number(part.summary)) for part in entry.parts)


def _scalar(entry: MergedSite, value: float) -> MergedSite:
    summary = empty()
    summary["count"] = 1
    summary["minimum"] = summary["maximum"] = summary["sum"] = summary["sketch"][0] = value
    summary["sum_of_squares"] = value * value
    return replace(entry, summary=summary[()], exact=False)
