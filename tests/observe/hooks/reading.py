"""Look up observations in a recording."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from traindiff.core.observation import SAMPLE, Observation
from traindiff.storage import open_recording

Row = tuple[Observation, np.void]


def rows(directory: Path, **where: Any) -> list[Row]:
    """All observations of rank 0 whose attributes have these values, in the order of the file; samples if asked for."""
    return [
        (seen, summary)
        for part in open_recording(str(directory)).steps(0)
        for seen, summary in zip(part.observations, part.summaries, strict=True)
        if ("stage" in where or seen.stage != SAMPLE)
        and all(getattr(seen, name) == value for name, value in where.items())
    ]


def row(directory: Path, **where: Any) -> Row:
    """The only observation with these values."""
    found = rows(directory, **where)
    assert len(found) == 1, [seen for seen, _ in found]
    return found[0]


def sites(found: list[Row]) -> list[tuple[str, str]]:
    return [(seen.path, seen.slot) for seen, _ in found]


def unobserved(directory: Path) -> list[tuple[str, str, str]]:
    """Path, slot and reason of everything that was not observed."""
    return [(seen.path, seen.slot, seen.unobserved) for seen, _ in rows(directory) if seen.unobserved]
