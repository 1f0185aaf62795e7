"""Tensors that are those of another step, and gradients that are other sums than they should be."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from traindiff.analyse.compare.case import Case, Diagnosis
from traindiff.analyse.compare.factors import contributed, odd_terms
from traindiff.analyse.compare.mixtures import DISTINCT, FEW, Mixture, mixture
from traindiff.analyse.findings import Finding, factor_text
from traindiff.analyse.merge.distance import best_fit
from traindiff.analyse.rules.carried import GradientsAreCleared
from traindiff.core.summary import distance, finite_count, norm_of

LATE = 0.02
"""A tensor is one step late if its difference from the step before is at most this part of its difference."""


def late(case: Case) -> Diagnosis | None:
    """The baseline's tensor of the step before; a gradient may also be a multiple of it, as clipping makes it."""
    if case.previous is None or int(case.previous["count"]) != int(case.candidate.summary["count"]):
        return None
    size = norm_of(case.previous)
    apart = float(distance(case.previous, case.candidate.summary)) / size if size else math.inf
    if apart <= LATE * min(case.difference, 1.0):
        return Diagnosis(
            kind="late",
            message=f"The candidate's is what the baseline has in the {case.unit} before: one {case.unit} late?",
            evidence={"difference_from_the_step_before": apart},
        )
    if not _is_gradient(case) or int(finite_count(case.previous)) < FEW:
        return None
    factor, left_over = best_fit(replace(case.baseline, summary=case.previous), case.candidate)
    _, own = best_fit(case.baseline, case.candidate)
    if factor <= 0.0 or left_over > LATE or own < DISTINCT * LATE:
        return None
    return Diagnosis(
        kind="late",
        message=f"The candidate's is {factor_text(factor)} x what the baseline has in the {case.unit} before: one "
        f"{case.unit} late, and clipped otherwise?",
        evidence={"factor": factor, "residual": left_over},
    )


_SUM = Mixture(own=1.0, before=1.0)


def accumulated(case: Case) -> Diagnosis | None:
    """The sum of two steps' gradients: zero_grad() was left out. Clipping gives each of the two a factor."""
    if case.previous is None or not _is_gradient(case) or case.baseline.shape != case.candidate.shape:
        return None
    before, own, both = case.previous, case.baseline.summary, case.candidate.summary
    tried = (_SUM, case.mixture, mixture(own, before, both))
    found = next((one for one in tried if one and math.isfinite(one.left_over(own, before, both))), None)
    if found is None:
        return None
    if found is _SUM:
        message = (
            f"The candidate's is the sum of the baseline's of this {case.unit} and of the {case.unit} before: was "
            "zero_grad() left out after that?"
        )
    else:
        follows = abs(found.before / (found.own * case.carried) - 1.0) <= 0.05
        why = "was zero_grad() left out after that, and the sum clipped or unscaled?"
        message = (
            f"The candidate's is {found.own:.4g} x the baseline's of this {case.unit} plus {found.before:.4g} x that "
            f"of the {case.unit} before: {why if follows else 'are gradients of several steps mixed?'}"
        )
    return Diagnosis(
        kind="accumulated",
        message=message,
        evidence={"own": found.own, "before": found.before, "residual": found.left_over(own, before, both)},
    )


def lost_state(case: Case) -> Diagnosis | None:
    """A running average of an optimizer without what the step before had left in it."""
    before = case.previous
    if case.baseline.key.phase != "optimizer" or before is None or case.baseline.shape != case.candidate.shape:
        return None
    if int(finite_count(before)) < FEW or int(before["count"]) != int(case.candidate.summary["count"]):
        return None
    lacking = case.baseline.summary["sketch"] - case.candidate.summary["sketch"]
    power, size = float(before["sketch"] @ before["sketch"]), math.sqrt(float(lacking @ lacking))
    if not power or not size:
        return None
    share = float(lacking @ before["sketch"]) / power
    left_over = math.sqrt(float(((lacking - share * before["sketch"]) ** 2).sum())) / size
    if left_over > LATE or not 0.1 < share <= 1.0 + LATE:
        return None
    return Diagnosis(
        kind="state-lost",
        message=f"The candidate's lacks what the {case.unit} before had left in it ({share:.4g} x that is missing): "
        "was the optimizer's state lost, or not loaded?",
        evidence={"share": share, "residual": left_over},
    )


def with_causes(found: Sequence[Finding]) -> list[Finding]:
    """Findings without those about carried gradients whose effect is a finding, too: that one says what causes it."""
    seen = {one.path for one in found if one.phase == "grad" and one.kind != GradientsAreCleared.name}
    causes = {one.path: one for one in found if one.kind == GradientsAreCleared.name and one.path in seen}
    return [
        replace(one, message=f"{one.message} {causes[one.path].message}")
        if one.phase == "grad" and one.path in causes and one.kind != "accumulated"
        else one
        for one in found
        if one not in causes.values()
    ]


def _is_gradient(case: Case) -> bool:
    return (case.baseline.key.phase, case.baseline.key.slot) == ("grad", "grad")


def lost_contribution(case: Case) -> Diagnosis | None:
    """A gradient that is not the sum of its micro-batches' gradients, or of the baseline's: of all ranks, or of one."""
    return _lost_of(case.contributions, case) or _lost_of(case.expected, case, whose="the baseline's ")


def _lost_of(contributions: Mapping[tuple[int, int], Any], case: Case, *, whose: str = "") -> Diagnosis | None:
    by_step: dict[int, Any] = {}
    for (micro_step, _), one in contributions.items():
        by_step[micro_step] = by_step.get(micro_step, 0.0) + one["sketch"]
    sketches = {place: one["sketch"] for place, one in contributions.items()}
    if (found := odd_terms(by_step, case.candidate)) is not None:
        odd, left_over = found
        said = contributed([(f"micro-step {step}", factor) for step, factor in odd], len(by_step), whose=whose)
        first, rank = odd[0][0], None
    elif len(sketches) > len(by_step) and (found := odd_terms(sketches, case.candidate)) is not None:
        odd, left_over = found
        (first, rank) = odd[0][0]
        names = [(f"rank {place[1]} in micro-step {place[0]}", factor) for place, factor in odd]
        said = contributed(names, len(sketches), whose=whose, each_rank=True)
    else:
        return None
    evidence = {"micro_step": first, "factor": odd[0][1], "residual": left_over}
    return Diagnosis(
        kind="lost-contribution",
        message=f"The optimizer's gradient {said}.",
        evidence=evidence if rank is None else {**evidence, "rank": rank},
    )
