"""A gradient that is not the sum of what its micro-batches and ranks brought."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from traindiff.comparison.case import Case, Diagnosis
from traindiff.findings.sentences import micro_steps_text
from traindiff.merging.step_table import Entry


def lost_contribution(case: Case) -> Diagnosis | None:
    """A gradient that is not the sum of what its micro-batches brought: of all ranks, or of one."""
    by_step: dict[int, Any] = {}
    for (micro_step, _), one in case.contributions.items():
        by_step[micro_step] = by_step.get(micro_step, 0.0) + one["sketch"]
    sketches = {place: one["sketch"] for place, one in case.contributions.items()}
    if (found := _odd_terms(by_step, case.candidate)) is not None:
        odd, left_over = found
        said = _contributed([(f"micro-step {step}", factor) for step, factor in odd], len(by_step))
        first, rank = odd[0][0], None
    elif len(sketches) > len(by_step) and (found := _odd_terms(sketches, case.candidate)) is not None:
        odd, left_over = found
        (first, rank) = odd[0][0]
        names = [(f"rank {place[1]} in micro-step {place[0]}", factor) for place, factor in odd]
        said = _contributed(names, len(sketches))
    else:
        return None
    evidence = {"micro_step": first, "factor": odd[0][1], "residual": left_over}
    return Diagnosis(
        kind="lost-contribution",
        says=f"The optimizer's gradient {said}.",
        evidence=evidence if rank is None else {**evidence, "rank": rank},
    )


def _odd_terms(sketches: Mapping[Any, Any], sum_of_them: Entry) -> tuple[list[tuple[Any, float]], float] | None:
    """The terms that are not in a sum once, with how often they are, and what that does not explain; or None."""
    if len(sketches) < 2:
        return None
    columns = np.stack(list(sketches.values()), axis=1)
    target = sum_of_them.summary["sketch"]
    factors, *_ = np.linalg.lstsq(columns, target, rcond=None)
    size = float(np.linalg.norm(target))
    left_over = float(np.linalg.norm(columns @ factors - target)) / size if size else 0.0
    # Of two terms, either could be the odd one; they are relative to the global loss, so each should be there once.
    common = float(np.median(factors)) if len(factors) > 2 else 1.0
    if left_over > 1e-3 or abs(common) < 1e-12:
        return None
    relative = factors / common
    odd = [(term, float(value)) for term, value in zip(sketches, relative, strict=True) if abs(value - 1.0) > 0.05]
    return (odd, left_over) if odd and len(odd) <= len(sketches) // 2 else None


def _contributed(odd: Sequence[tuple[str, float]], num_terms: int) -> str:
    """What is odd about a gradient, from the factors with which some of its terms are in it."""
    lost = [name for name, factor in odd if abs(factor) < 0.02]
    rest = num_terms - len(odd)
    others = f"the other {rest} once" if rest > 1 else "the other one once"
    if len(lost) == len(odd):
        sum_of = f"it is the sum of the other {rest}" if rest > 1 else "it is that of the other one"
        return f"lacks what {_listed(lost)} of {num_terms} contributed; {sum_of}"
    held = [(name, factor) for name, factor in odd if name not in lost]
    parts = [f"holds what {name} of {num_terms} contributed {_times(value)}" for name, value in held]
    lacks = [f"lacks what {_listed(lost)} contributed"] if lost else []
    return f"{', '.join([*parts, *lacks])}; {others}"


def _listed(names: Sequence[str]) -> str:
    """`micro-step 0`, `micro-steps 0, 2 and 3`."""
    if len(names) == 1:
        return names[0]
    word = "micro-step "
    if all(name.startswith(word) for name in names):
        return micro_steps_text([int(name.removeprefix(word)) for name in names])
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _times(value: float) -> str:
    return "twice" if abs(value - 2.0) < 0.02 else f"{value:.3g} times"
