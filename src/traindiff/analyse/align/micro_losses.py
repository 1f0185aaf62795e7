"""Losses of a step that its runs divide otherwise, combined as the gradients combine them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from traindiff.analyse.align.side import Tables
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable, derived_number
from traindiff.core.summary import add, number

_REORDERED = 1e-3
"""Relative difference up to which the losses of two runs count as the same in another order."""


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


def with_added_losses(tables: Tables) -> Tables:
    """The tables of a step in which one run calls `backward` on several losses, and the other on their sum.

    Calls of `backward` add up their gradients. So a step minimizes the sum of the tensors on which it calls `backward`,
    however many these are, and in any order. So the terms of this sum have no order either.
    """
    losses = [_backward_calls(table) for table in tables]
    apart = [site for site in losses[0] if site in losses[1] and _are_divided(losses[0][site], losses[1][site])]
    if not apart:
        return tables
    baseline, candidate = (
        {key: entry for key, entry in table.items() if key._replace(call=0) not in apart}
        | {site: added for site in apart if (added := _added(found[site])) is not None}
        for table, found in zip(tables, losses, strict=True)
    )
    return baseline, candidate


def with_summed_passes(tables: Tables) -> Tables:
    """The tables of a step in which the runs go back through a graph another number of times.

    A gradient of an activation is the sum of what all passes bring, whether the training goes back once for a sum of
    losses or once for each of them (and combines the gradients of parameters itself).
    """
    passes = [_passes(table) for table in tables]
    differ = [
        site for site in passes[0] if site in passes[1] and len(passes[0][site]) != len(passes[1][site])
    ]  # else they are compared one by one
    if not differ:
        return tables
    baseline, candidate = (
        {key: entry for key, entry in table.items() if _of_first_pass(key) not in differ}
        | {site: summed(site, found[site]) for site in differ}
        for table, found in zip(tables, passes, strict=True)
    )
    return baseline, candidate


_AGAIN = re.compile(r"again\[\d+\]")


def _of_first_pass(key: SiteKey) -> SiteKey:
    again = key.phase == "backward" and key.stage and _AGAIN.fullmatch(key.stage)
    return key._replace(stage="") if again else key


def _passes(table: StepTable) -> dict[SiteKey, list[MergedSite]]:
    """The gradients of activations, each with what further passes brought."""
    found: dict[SiteKey, list[MergedSite]] = {}
    for key, entry in table.items():
        if key.phase == "backward" and (site := _of_first_pass(key)).stage == "" and not entry.unobserved:
            found.setdefault(site, []).append(entry)
    return {site: entries for site, entries in found.items() if len({one.shape for one in entries}) == 1}


def summed(site: SiteKey, entries: Sequence[MergedSite]) -> MergedSite:
    """The sum of several tensors of one shape, at a site."""
    if len(entries) == 1:
        return entries[0]
    return replace(
        entries[0], key=site, summary=add([one.summary for one in entries], [1.0] * len(entries)), exact=False,
        parts=(),
    )  # fmt: skip


def _backward_calls(table: StepTable) -> dict[SiteKey, dict[int, MergedSite]]:
    """The tensors on which `backward` is called, by site and call."""
    found: dict[SiteKey, dict[int, MergedSite]] = {}
    for key, entry in table.items():
        if key.phase == "loss" and not key.stage and not entry.shape and not entry.unobserved:
            found.setdefault(key._replace(call=0), {})[key.call] = entry
    return found


def _are_divided(baseline: Mapping[int, MergedSite], candidate: Mapping[int, MergedSite]) -> bool:
    """True if two runs call `backward` on different parts of a sum: more of them, or the same in another order."""
    if baseline.keys() != candidate.keys():
        return True
    one, other = ([number(calls[call].summary) for call in sorted(calls)] for calls in (baseline, candidate))
    return not _close(one, other) and _close(sorted(one), sorted(other))


def _close(one: list[float], other: list[float]) -> bool:
    return bool(np.allclose(one, other, rtol=_REORDERED, atol=0))


def _added(calls: Mapping[int, MergedSite]) -> MergedSite | None:
    total = sum(number(entry.summary) for entry in calls.values())
    first = calls[min(calls)]
    if not math.isfinite(total):
        return None
    parts = (part for entry in calls.values() for part in entry.parts)
    terms = sorted(parts, key=lambda part: (part.micro_step, part.rank, int(part.summary["fingerprint"])))
    return replace(
        first, key=first.key._replace(call=0), summary=derived_number(total), exact=len(calls) == 1 and first.exact,
        parts=tuple(terms),
    )  # fmt: skip


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
