"""What clipping did to gradients: the calls of one run held against those of the other."""

from __future__ import annotations

import math
from collections.abc import Iterator

from traindiff.findings import Finding
from traindiff.merging.clips import EFFECT, Clip
from traindiff.merging.finding_at import finding_at

KIND = "clipping"
"""Kind of a finding about one run that clips its gradients where the other does not, or to something else."""


def clip_factor(baseline: list[Clip], candidate: list[Clip]) -> list[tuple[float, str]]:
    """The factor that clipping leaves between the gradients of two runs, and what to say of it."""
    if len(baseline) > 1 or len(candidate) > 1:
        return []
    before, after = (math.prod(one.coefficient for one in clipped) for clipped in (baseline, candidate))
    if not before or not after or abs(after / before - 1.0) <= EFFECT:
        return []  # clipped to nothing: what is left says nothing of what it was
    return [(after / before, "= what clipping makes of them")]


def clipping_findings(baseline: list[Clip], candidate: list[Clip], *, step: int) -> Iterator[Finding]:
    """Clipping that one run does and the other does not, or to something else, where it has an effect."""
    sides = (("baseline", baseline), ("candidate", candidate))
    for (name, own), (other, others) in (sides, sides[::-1]):
        acting = [one for one in own if one.effective]
        if acting and not others:
            first = acting[0]
            says = f"The {name} clips {first.what}; the {other} does not clip."
            if first.norm is not None:
                where = " there" if first.only else ""
                says += f" Their norm was {first.norm:.4g}, so all of them{where} were multiplied by "
                says += f"{first.coefficient:.4g}."
            yield _finding(first, step=step, says=says, run=name)
    if len(baseline) != len(candidate):
        return
    for expected, actual in zip(baseline, candidate, strict=True):
        if (expected.effective or actual.effective) and expected.what != actual.what:
            says = f"The baseline clips {expected.what}, the candidate clips {actual.what}."
            yield _finding(expected, step=step, says=says, run="baseline")


def clipping_note(baseline: list[Clip], candidate: list[Clip]) -> str:
    """What to say of clipping without an effect that only one run does; empty where there is none."""
    for name, own, others in (("baseline", baseline, candidate), ("candidate", candidate, baseline)):
        if own and not others and not any(one.effective for one in own):
            return f"Only the {name} clips {own[0].what}; that changed nothing."
    return ""


def _finding(clip: Clip, *, step: int, says: str, run: str) -> Finding:
    evidence = {"run": run, "limit": clip.limit, "norm": clip.norm, "coefficient": clip.coefficient}
    size = abs(clip.coefficient - 1.0) or math.inf
    return finding_at(clip.entry, step=step, kind=KIND, says=says, evidence=evidence, difference=size)
