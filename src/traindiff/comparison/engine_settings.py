"""What an engine does of its own accord, where that explains a difference: clipping, AdamW in place of Adam."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from traindiff.comparison.clipping import KIND as CLIPPING
from traindiff.findings import Finding
from traindiff.rounding import UNIT_ROUNDOFF

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
        if says := _clips_by_default(finding, name, engine) or _makes_adamw(finding, name, engine):
            return replace(finding, says=finding.says + says, evidence={**finding.evidence, "run": name})
    return finding


def _clips_by_default(finding: Finding, name: str, engine: Mapping[str, Any]) -> str:
    if not engine or finding.kind != CLIPPING or finding.evidence.get("run") != name:
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
