"""What clipping did to gradients: the calls of one run held against those of the other."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.finding_at import finding_at
from traindiff.analyse.merge.recorded_calls import EFFECT, Clip
from traindiff.core.summary import UNIT_ROUNDOFF

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


def clipping_note(baseline: list[Clip], candidate: list[Clip]) -> str:
    """What to say of clipping without an effect that only one run does; empty where there is none."""
    for name, own, others in (("baseline", baseline, candidate), ("candidate", candidate, baseline)):
        if own and not others and not any(one.effective for one in own):
            return f"Only the {name} clips {own[0].what}; that changed nothing."
    return ""


def _finding(clip: Clip, *, step: int, message: str, run: str) -> Finding:
    evidence = {"run": run, "limit": clip.limit, "norm": clip.norm, "coefficient": clip.coefficient}
    size = abs(clip.coefficient - 1.0) or math.inf
    return finding_at(clip.entry, step=step, kind=KIND, message=message, evidence=evidence, difference=size)


FLOAT32_COEFFICIENTS = frozenset({"FusedAdam", "DeepSpeedCPUAdam"})
"""Optimizers that compute 1 - beta from a beta in float32: for 0.999 that is 1.3e-5 too small."""

DEFAULT_LIMIT = 1.0
"""The norm to which DeepSpeed clips gradients since 0.19.3, unless its configuration says otherwise."""


def coefficient_error(contents: Iterable[Mapping[str, Any]]) -> float:
    """Relative error that 1 - beta may have in one of two runs, for betas up to 0.999.

    Args:
        contents: What the ranks of both hold (`rank.json`).
    """
    kinds = {optimizer.get("type") for content in contents for optimizer in content.get("optimizers", ())}
    return UNIT_ROUNDOFF["float32"] / 1e-3 if kinds & FLOAT32_COEFFICIENTS else 0.0


def explained(finding: Finding, baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> Finding:
    """The finding, which says so if an engine's own setting explains it.

    Args:
        finding: The first one.
        baseline: `run.json` of the baseline.
        candidate: `run.json` of the candidate.
    """
    for name, run in (("baseline", baseline), ("candidate", candidate)):
        engine = run.get("engine") or {}
        if message := _clips_by_default(finding, name, engine) or _makes_adamw(finding, name, engine):
            return replace(finding, message=finding.message + message, evidence={**finding.evidence, "run": name})
    return finding


def _clips_by_default(finding: Finding, name: str, engine: Mapping[str, Any]) -> str:
    if not engine or finding.kind != KIND or finding.evidence.get("run") != name:
        return ""
    if finding.evidence.get("limit") != DEFAULT_LIMIT or engine.get("gradient_clipping") != DEFAULT_LIMIT:
        return ""
    return (
        ' DeepSpeed does so by default since 0.19.3: write "gradient_clipping": 0.0 in its configuration, or clip in '
        "both runs."
    )


def _makes_adamw(finding: Finding, name: str, engine: Mapping[str, Any]) -> str:
    if finding.kind != "hyper-parameter" or finding.slot not in ("decoupled_weight_decay", "weight_decay"):
        return ""
    if str(engine.get("asked_for")).lower() != "adam" or not engine.get("decoupled_weight_decay"):
        return ""
    return (
        f" The {name}'s configuration asks DeepSpeed for Adam, and it makes AdamW of that ({engine['optimizer']}): "
        'write "adam_w_mode": false for Adam.'
    )
