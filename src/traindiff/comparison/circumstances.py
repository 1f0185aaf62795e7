"""Differences between the circumstances of two runs: no finding, but worth knowing when there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from traindiff.recording.manifest import framework

_WATCHED = (
    ("versions", "torch"),
    ("versions", "mindspore"),
    ("versions", "triton"),
    ("environment", "machine"),
    ("environment", "devices"),
    ("environment", "num_threads"),
    ("environment", "default_dtype"),
    ("environment", "float32_matmul_precision"),
    ("environment", "deterministic_algorithms"),
)

_OF_ANY_FRAMEWORK = (("environment", "machine"),)
"""What means the same in another framework."""


def circumstances(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> list[str]:
    """One sentence that lists what differs between two `run.json`, or nothing."""
    runs = (baseline, candidate)
    frameworks = framework(baseline), framework(candidate)
    differ = frameworks[0][0] != frameworks[1][0] and all(run.get("environment") for run in runs)
    changes = [" and ".join(map(" ".join, frameworks))] if differ else []
    for section, name in _OF_ANY_FRAMEWORK if differ else _WATCHED:
        sections = [run.get(section, {}) for run in runs]
        before, after = (one.get(name) for one in sections)
        if before != after and all(sections):  # of a run that was imported, nothing is known
            changes.append(f"{name.replace('_', ' ')} {_show(before)} and {_show(after)}")
    if baseline.get("world_size") != candidate.get("world_size"):
        changes.append(f"world size {baseline.get('world_size')} and {candidate.get('world_size')}")
    return [f"Circumstances differ (baseline and candidate): {'; '.join(changes)}."] if changes else []


def other_dtypes(sites: Mapping[tuple[str, str], Set[object]]) -> list[str]:
    """One sentence per pair of dtypes, where the two runs compute in different ones.

    Args:
        sites: Sites by dtype in the baseline and in the candidate.
    """
    return [
        f"{len(found)} {'site is' if len(found) == 1 else 'sites are'} {baseline} in the baseline and {candidate} in "
        "the candidate; floors follow the shorter of the two."
        for (baseline, candidate), found in sites.items()
    ]


def not_forced(candidate: Sequence[Mapping[str, Any]]) -> list[str]:
    """One sentence where tensors of a forced run kept their own values.

    Args:
        candidate: What the ranks of the run hold (`rank.json`).
    """
    own = {site: why for content in candidate for site, why in content.get("not_forced", {}).items()}
    if not own:
        return []
    site, why = next(iter(own.items()))
    more = f" and {len(own) - 1} more" if len(own) > 1 else ""
    return [f"Not forced, so what is computed from it may carry earlier errors: {site} ({why}){more}."]


def other_models(models: tuple[str, str], paths: tuple[frozenset[str], frozenset[str]]) -> list[str]:
    """One sentence for recordings of models that have nothing in common, or nothing."""
    baseline, candidate = (one - {""} for one in paths)
    if not baseline or not candidate or baseline & candidate:
        return []
    return [
        f"The recordings are of different models, {' and '.join(models)}: no module or parameter has the same path in "
        "both. Give recordings of one model, or --rename PATTERN=REPLACEMENT."
    ]


def _show(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
