"""Differences between the circumstances of two runs: no finding, but worth knowing when there is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_WATCHED = (
    ("versions", "torch"),
    ("versions", "triton"),
    ("environment", "machine"),
    ("environment", "devices"),
    ("environment", "num_threads"),
    ("environment", "default_dtype"),
    ("environment", "float32_matmul_precision"),
    ("environment", "deterministic_algorithms"),
)


def circumstances(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> list[str]:
    """One sentence that lists what differs between two `run.json`, or nothing."""
    changes = []
    for section, name in _WATCHED:
        before, after = baseline.get(section, {}).get(name), candidate.get(section, {}).get(name)
        if before != after:
            changes.append(f"{name.replace('_', ' ')} {_show(before)} and {_show(after)}")
    if baseline.get("world_size") != candidate.get("world_size"):
        changes.append(f"world size {baseline.get('world_size')} and {candidate.get('world_size')}")
    return [f"Circumstances differ (baseline and candidate): {'; '.join(changes)}."] if changes else []


def _show(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
