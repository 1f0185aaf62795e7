"""What is said of recordings, and of their compact forms: it must be the same."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from traindiff.analyse.check import check
from traindiff.analyse.compact.compacting import compact
from traindiff.analyse.compare import compare


def compacted(recording: str | os.PathLike[str], directory: Path, **options: Any) -> Path:
    """The compact form of a recording, made once in this directory."""
    target = directory / f"{Path(recording).name}-compact"
    if not target.exists():
        compact(recording, target, **options)
    return target


def comparison_of(baseline: Path, candidate: Path | str, **options: Any) -> Mapping[str, Any]:
    """What is said of two recordings, without their paths."""
    return without_paths(compare(baseline, candidate, **options).to_json(), baseline, candidate)


def verdict_of(recording: Path, **options: Any) -> Mapping[str, Any]:
    """What is said of a recording, without its path."""
    return without_paths(check(recording, **options).to_json(), recording)


def assert_the_same_is_said(baseline: Path, candidate: Path, directory: Path, **options: Any) -> None:
    """Both whole, both compact, and each of them compact alone; and what is said of the candidate by itself."""
    whole = comparison_of(baseline, candidate, **options)
    compact_ones = compacted(baseline, directory), compacted(candidate, directory)
    for sides in (compact_ones, (baseline, compact_ones[1]), (compact_ones[0], candidate)):
        assert comparison_of(*sides, **options) == whole
    assert verdict_of(compact_ones[1]) == verdict_of(candidate)


def without_paths(said: Any, *paths: Any) -> Any:
    """JSON values in which no path of these recordings is left."""
    if isinstance(said, dict):
        return {name: without_paths(one, *paths) for name, one in said.items()}
    if isinstance(said, list):
        return [without_paths(one, *paths) for one in said]
    if isinstance(said, str):
        for path in sorted(map(str, paths), key=len, reverse=True):
            said = said.replace(path, "RECORDING")
    return said
