"""Calls that clip gradients in one run only, or to another limit: findings, notes, and the factor that they leave."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence

from traindiff.analyse.align.side import gradient_norms
from traindiff.analyse.compare.factors import factor_meaning
from traindiff.analyse.findings import Finding, factor_text
from traindiff.analyse.merge.distance import Pair
from traindiff.analyse.merge.recorded_calls import EFFECT, Clip
from traindiff.analyse.merge.site import finding_at
from traindiff.core.summary import UNIT_ROUNDOFF, largest, number

KIND = "clipping"
"""Kind of a finding about clipping that differs between the runs."""

_KNOWN = re.compile(r"world size|micro-batches")
"""Meanings of a factor that no correct run has. Other factors may be those of another, equal loss."""


def clip_coefficient(clipped: Iterable[Clip]) -> float:
    """The factor that all calls that clip to a norm apply together."""
    return math.prod(one.coefficient for one in clipped)


def clip_factor(baseline: list[Clip], candidate: list[Clip]) -> list[tuple[float, str]]:
    """The factor that clipping leaves between the gradients of two runs, with what to say about it."""
    if len(baseline) > 1 or len(candidate) > 1:
        return []
    before, after = clip_coefficient(baseline), clip_coefficient(candidate)
    if not before or not after or abs(after / before - 1.0) <= EFFECT:
        return []  # a gradient clipped to 0 has no factor
    return [(after / before, "= what clipping makes of them")]


def clipping_findings(
    baseline: list[Clip], candidate: list[Clip], pairs: Sequence[Pair], *, step: int
) -> Iterator[Finding]:
    """Findings about effective clipping that only one run does, or that has another limit in the other run.

    Args:
        baseline: The baseline's calls that clip.
        candidate: The candidate's.
        pairs: All pairs of the step, among them the gradients that optimizers use.
        step: The step.
    """
    sides = (("baseline", baseline), ("candidate", candidate))
    for (name, own), (other, others) in (sides, sides[::-1]):
        acting = [one for one in own if one.effective]
        if acting and not others and not _is_in_both(acting, pairs):
            first = acting[0]
            message = f"The {name} clips {first.what}; the {other} does not clip."
            if first.norm is not None:
                where = " there" if first.only else ""
                message += f" Their norm was {first.norm:.4g}, so all of them{where} were multiplied by "
                message += f"{first.coefficient:.4g}."
            yield _finding(first, step=step, message=message, run=name)
    if len(baseline) != len(candidate):
        return
    for expected, actual in zip(baseline, candidate, strict=True):
        if (expected.effective or actual.effective) and expected.what != actual.what:
            message = f"The baseline clips {expected.what}, the candidate clips {actual.what}."
            yield _finding(expected, step=step, message=message, run="baseline")


def hidden_by_clipping(
    baseline: list[Clip], candidate: list[Clip], *, step: int, micro_steps: int, ranks: int
) -> Iterator[Finding]:
    """Findings about norms that differ by a known factor before both runs clip to the same one, which hides it."""
    for before, after in zip(baseline, candidate, strict=False) if len(baseline) == len(candidate) else ():
        if not (before.effective and after.effective and before.what == after.what and before.norm and after.norm):
            continue
        factor = after.norm / before.norm
        meaning = factor_meaning(factor, micro_steps, ranks)
        if not _KNOWN.search(meaning) or abs(factor - 1.0) < 0.1:
            continue
        message = (
            f"Before they are clipped, the norm of gradients is {before.norm:.4g} in the baseline and "
            f"{after.norm:.4g} in the candidate: {factor_text(factor, 0.01)} x{meaning}. Clipping hides that."
        )
        evidence = {"baseline_norm": before.norm, "candidate_norm": after.norm, "factor": factor}
        yield finding_at(
            before.entry, step=step, kind=KIND, message=message, evidence=evidence, difference=abs(factor - 1.0)
        )


def clipping_note(baseline: list[Clip], candidate: list[Clip], pairs: Sequence[Pair]) -> str:
    """A note on clipping that only one run is seen to do, and that makes no difference; empty if there is none."""
    sides = (("baseline", baseline, candidate), ("candidate", candidate, baseline))
    for (name, own, others), (other, _, _) in zip(sides, sides[::-1], strict=True):
        if not own or others:
            continue
        acting = [one for one in own if one.effective]
        if not acting:
            return f"Only the {name} clips {own[0].what}; that changed nothing."
        if _is_in_both(acting, pairs):
            return (
                f"Only the {name} is seen to clip {acting[0].what}. The gradients that the {other}'s optimizer uses "
                "are as small, so it scales them in another way."
            )
    return ""


def _is_in_both(acting: Sequence[Clip], pairs: Sequence[Pair]) -> bool:
    """True if the gradients that both optimizers use are clipped, although only one run is seen to do it.

    A training may clip by hand, or in its optimizer. If one run clips to a norm and the other does not, the norm of all
    gradients differs by the factor of clipping; of several calls for parts of the model, by at least the weakest. If
    both clip, it differs by noise. Half of the factor's logarithm tells these apart.
    """
    used = gradient_norms(pairs)
    if not used or any(one.only for one in acting):
        return False
    coefficients = [one.coefficient for one in acting if one.norm is not None]
    if not coefficients:
        gradients = [pair for pair in pairs if pair.baseline.key[:2] == ("grad", "")]
        return all(_is_below(pair, min(one.limit for one in acting)) for pair in gradients)
    norms = [number(one.summary) for one in (used[0].baseline, used[0].candidate)]
    if not all(0.0 < one < math.inf for one in (*norms, *coefficients)):
        return False
    return abs(math.log(norms[0] / norms[1])) < min(abs(math.log(one)) for one in coefficients) / 2.0


def _is_below(pair: Pair, limit: float) -> bool:
    """True if no element of a gradient is above a limit in either run, up to the rounding of its dtype."""
    return all(
        float(largest(one.summary)) <= limit * (1.0 + max(EFFECT, UNIT_ROUNDOFF.get(one.dtype, 0.0)))
        for one in (pair.baseline, pair.candidate)
    )


def _finding(clip: Clip, *, step: int, message: str, run: str) -> Finding:
    evidence = {"run": run, "limit": clip.limit, "norm": clip.norm, "coefficient": clip.coefficient}
    size = abs(clip.coefficient - 1.0) or math.inf
    return finding_at(clip.entry, step=step, kind=KIND, message=message, evidence=evidence, difference=size)
