"""A run on several ranks computes what one process does, at every site."""

from __future__ import annotations

from pathlib import Path

import traindiff


def assert_equivalent(baseline: Path, candidate: Path) -> None:
    comparison = traindiff.compare(baseline, candidate)
    assert comparison.verdict == "equivalent", str(comparison)
    assert not any(comparison.unaligned)
    everything = traindiff.compare(baseline, baseline).differences
    compared = {(row.phase, row.path, row.slot) for row in comparison.differences}
    assert {(row.phase, row.path, row.slot) for row in everything} == compared
