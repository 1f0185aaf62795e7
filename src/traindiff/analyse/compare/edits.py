"""Parameters that something else than the optimizer changes between two steps, in each run in another way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from traindiff.analyse.align.two_runs import RUNS, AlignedStep
from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.site import MergedSite, SiteKey, finding_at
from traindiff.core.observation import EDITED
from traindiff.core.summary import UNIT_ROUNDOFF, distance, norm

_GAIN = 8.0
"""How far the same edit may pull apart parameters that differ already: clipping does not, scaling by 2 does twice."""

_ROUNDINGS = 8.0
"""Roundings of all elements by which the same edit of the same bits may differ on two machines."""

_FLIPPED = 0.1
"""Share of an edit that may turn with rounding: an element at a threshold that is pruned, or rounded to a grid."""


_Edited = tuple[MergedSite | None, MergedSite | None]
"""A parameter that was edited, in both runs; None in the run that left it alone."""


class EditsApart:
    """Tells the edits of parameters that differ between the runs, step by step.

    The rule `edited` names each parameter of a run once, so that it cannot tell an edit that both runs make from two
    different ones.
    """

    def __init__(self) -> None:
        self._left: dict[str, tuple[Any, Any]] = {}  # by path: summaries after the latest step, in both runs

    def findings(self, given: AlignedStep, told: Iterable[Finding]) -> list[Finding]:
        """Edits before a step that differ, except those in `told`; steps must be given in order."""
        named = {path for one in told if one.kind == "edited" for path in one.evidence["paths"]}
        edits = [
            {key.path: entry for key, entry in table.items() if key[:2] == ("param", EDITED) and key.slot == "value"}
            for table in given.tables
        ]
        found = []
        for path in {**edits[0], **edits[1]}:
            if path not in named and path in given.parameters and path in self._left:
                found += self._apart(given, path, (edits[0].get(path), edits[1].get(path)))
        self._leave(given)
        return found

    def _apart(
        self, given: AlignedStep, path: str, edited: tuple[MergedSite | None, MergedSite | None]
    ) -> list[Finding]:
        pair, left = given.parameters[path], self._left[path]
        here = edited[0] or edited[1]
        if here is None or pair.baseline.unobserved or pair.candidate.unobserved:
            return []
        now = (pair.baseline.summary, pair.candidate.summary)
        moved = [float(distance(*both)) for both in zip(left, now, strict=True)]
        size, before, whole = float(distance(*now)), float(distance(*left)), float(norm(now[0]))
        u = max(UNIT_ROUNDOFF.get(one.dtype, 0.0) for one in (pair.baseline, pair.candidate))
        floor = _GAIN * before + _ROUNDINGS * u * whole
        if before:
            floor = max(floor, _FLIPPED * max(moved))
        if not size > floor:  # NaN is found where it appears
            return []
        when = f"{path} changed between step {given.step - 1} and step {given.step}, not by the optimizer's step"
        if None in edited:
            message = f"In the {RUNS[edited[0] is None]}, {when}."
        else:
            message = (
                f"{when}, and otherwise in each run: by {moved[0]:.3g} in the baseline and by {moved[1]:.3g} in the "
                f"candidate (L2 norms of the changes). Before that it differed by {before:.3g}, then by {size:.3g}."
            )
        return [
            finding_at(
                here, step=given.step, kind="edited", message=message, evidence={"paths": [path]},
                difference=size / whole if whole else np.inf, floor=floor / whole if whole else 0.0,
            )
        ]  # fmt: skip

    def _leave(self, given: AlignedStep) -> None:
        """Note the parameters as the step left them."""
        baseline, candidate = given.tables
        for key, entry in baseline.items():
            if key.phase != "param" or key.stage or key.slot != "value":
                continue
            other = candidate.get(SiteKey(*key))
            if other is None or entry.unobserved or other.unobserved or other.shape != entry.shape:
                self._left.pop(key.path, None)
            else:  # copies: see GradientsTogether
                self._left[key.path] = np.array(entry.summary)[()], np.array(other.summary)[()]
