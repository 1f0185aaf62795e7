"""Histograms of binary exponents, of recordings that hold them (`record(detail="exponents")`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.errors import RecordingError
from traindiff.observation import Observation
from traindiff.recording import Recording, open_recording
from traindiff.report.page.site_rows import Place, SiteRow

FIRST = -160
"""Binary exponent that the first count of a histogram is of (FORMAT.md)."""

Counts = NDArray[np.int64]


def histograms(paths: Sequence[str], rows: Sequence[SiteRow]) -> dict[int, dict[str, Any]]:
    """Histograms of the sites of a page, each in the step that its numbers are of.

    Args:
        paths: Of one recording, or of two.
        rows: The sites.

    Returns:
        By row: `first`, the exponent of the first count, and `counts` of each recording, over the exponents that any
        of them has; empty where no recording has histograms.
    """
    wanted = {(row.place, row.step): at for at, row in enumerate(rows) if not row.micro_step}
    try:
        held = [_of_recording(open_recording(path), wanted) for path in paths]
    except (RecordingError, OSError):
        return {}
    found = {}
    for at in sorted(set.intersection(*(set(one) for one in held))):
        counts = np.array([one[at] for one in held])
        some = np.flatnonzero(counts.any(axis=0))
        if some.size:
            first, last = int(some[0]), int(some[-1])
            found[at] = {"first": first + FIRST, "counts": counts[:, first : last + 1].tolist()}
    return found


def _of_recording(recording: Recording, wanted: Mapping[tuple[Place, int], int]) -> dict[int, Counts]:
    """The sums of the histograms of the disjoint parts of each site."""
    found: dict[int, Counts] = {}
    if "exponents" not in recording.run["settings"].get("detail", ()):
        return found
    steps = {step for _, step in wanted}
    seen: set[tuple[Any, ...]] = set()
    for rank in recording.ranks:
        for step in recording.steps(rank):
            if step.step not in steps:
                continue
            for number, counts in step.stored.exponents.items():
                one = step.observations[number]
                at = wanted.get((_place(one), one.step))
                part = (at, one.micro_step, one.shard)  # copies on several ranks count once
                # A sum of tensors has another histogram than its terms, and a scaled one lies elsewhere.
                if at is None or part in seen or one.merge != "shard" or one.scaled or one.factor != 1.0:
                    continue
                seen.add(part)
                found[at] = found[at] + counts if at in found else np.array(counts)
    return found


def _place(one: Observation) -> Place:
    return one.phase, one.stage, one.path, one.slot, one.call
