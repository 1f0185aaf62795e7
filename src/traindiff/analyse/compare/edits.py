"""Parameters that something else than an optimizer changes between two steps, in each run in another way."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from traindiff.analyse.align.side import RUNS
from traindiff.analyse.align.two_runs import AlignedStep
from traindiff.analyse.findings import Finding, between_steps
from traindiff.analyse.merge.distance import difference
from traindiff.analyse.merge.site import MergedSite, SiteKey, finding_at
from traindiff.analyse.rules.rule import RunFacts
from traindiff.core.observation import BEFORE, EDITED, MASTER
from traindiff.core.summary import UNIT_ROUNDOFF, distance, norm_of

_GAIN = 8.0
"""How far the same edit may pull apart parameters that differ already: clipping does not, scaling by 2 does twice."""

_ROUNDINGS = 8.0
"""Roundings of all elements by which the same edit of the same bits may differ on two machines."""

_AVERAGED = 2.0
"""The same for a parameter that is an average of others, element by element: in a few operations, each rounds once.

Three operations in bfloat16 differ from a single one by 0.9 roundings in L2. Few elements may all round the same way.
"""

_FLIPPED = 0.1
"""Share of an edit that may turn with rounding: an element at a threshold that is pruned, or rounded to a grid."""


class EditsApart:
    """Tells the changes of parameters between steps that differ between the runs, step by step.

    The rule `edited` names each parameter of a run once, so that it cannot tell an edit that both runs make from two
    different ones. It says nothing of parameters that no optimizer holds: the training updates these itself, or makes
    them averages of others.

    Args:
        facts: About both runs. Nothing is judged if one of them does not record all changes.
        forced: Whether parameters of the candidate are set to the baseline's.
    """

    def __init__(self, facts: tuple[RunFacts, RunFacts], *, forced: bool) -> None:
        self._left: dict[str, tuple[Any, Any]] = {}  # by path: summaries after the latest step, in both runs
        self._seen = all(one.sees_changes for one in facts)
        held = {path for one in facts for path in one.held_in}
        by_hand = held and self._seen and not forced
        self._unheld = facts[0].parameters - held if by_hand else frozenset[str]()
        self._untrained = self._unheld | (facts[0].parameters - facts[0].trainable - facts[1].trainable)
        self._gradients: dict[str, float] = {}  # by path: largest relative difference of the gradient so far
        self._mastered: set[str] = set()  # parameters that are copied from master weights, and so no averages
        self._step = -1

    def findings(self, given: AlignedStep, told: Iterable[Finding]) -> list[Finding]:
        """Changes before a step that differ, except those in `told`; steps must be given in order."""
        named = {path for one in told if one.kind == "edited" for path in one.evidence["paths"]}
        parts = [[part.table for part in (*side.earlier, side)] for side in given.recorded]
        edits = [
            {key.path: entry for table in tables for key, entry in table.items() if self._is_edit(key)}
            for tables in parts
        ]
        if self._unheld:  # only of these it is asked
            self._mastered |= {key.path for tables in parts for table in tables for key in table if key.slot == MASTER}
        found = []
        for path in {**edits[0], **edits[1]} if self._seen else ():
            judged = path in given.parameters and path in self._left
            if path not in named and judged and (path not in self._unheld or self._step == given.step - 1):
                found += self._apart(given, path, (edits[0].get(path), edits[1].get(path)))
        self._leave(given)
        return found

    def _is_edit(self, key: SiteKey) -> bool:
        stage = BEFORE if key.path in self._unheld else EDITED
        return key[:2] == ("param", stage) and key.slot == "value"

    def _apart(
        self, given: AlignedStep, path: str, edited: tuple[MergedSite | None, MergedSite | None]
    ) -> list[Finding]:
        pair, left = given.parameters[path], self._left[path]
        here = edited[0] or edited[1]
        if here is None or pair.baseline.unobserved or pair.candidate.unobserved:
            return []
        now = (pair.baseline.summary, pair.candidate.summary)
        moved = [float(distance(*both)) for both in zip(left, now, strict=True)]
        size, before, whole = float(distance(*now)), float(distance(*left)), norm_of(now[0])
        u = max(UNIT_ROUNDOFF.get(one.dtype, 0.0) for one in (pair.baseline, pair.candidate))
        roundings = _ROUNDINGS
        if path in self._unheld and path not in self._gradients and path not in self._mastered:
            roundings = min(_ROUNDINGS, _AVERAGED * (1.0 + 3.0 / math.sqrt(max(1, int(now[0]["count"])))))
        floor = _GAIN * before + roundings * u * whole
        if path in self._untrained:
            floor += _GAIN * self._inflow(given, path, max(moved))
        if before:
            floor = max(floor, _FLIPPED * max(moved))
        if not size > floor:  # NaN is found where it appears
            return []
        return [
            finding_at(
                here, step=given.step, kind="edited", evidence={"paths": [path]},
                message=self._message(path, moved, (before, size), step=given.step),
                difference=size / whole if whole else np.inf, floor=floor / whole if whole else 0.0,
            )
        ]  # fmt: skip

    def _inflow(self, given: AlignedStep, path: str, moved: float) -> float:
        """How far what a parameter is updated from pulls it apart.

        That is its gradient, in proportion; or else parameters of its shape, of which it may be an average.
        """
        if path in self._gradients:
            return self._gradients[path] * moved
        shape = given.parameters[path].baseline.shape
        sources = [one for other, one in given.parameters.items() if other != path and one.baseline.shape == shape]
        return max((float(distance(one.baseline.summary, one.candidate.summary)) for one in sources), default=0.0)

    def _message(self, path: str, moved: Sequence[float], apart: tuple[float, float], *, step: int) -> str:
        how = ", which no optimizer holds," if path in self._unheld else ""
        means = "" if path in self._unheld else ", not by the optimizer's step"
        when = f"{path}{how} changed {between_steps(step)}{means}"
        if not all(moved):
            alone = f"In the {RUNS[not moved[0]]}, {when}"
            return f"{alone}. In the {RUNS[bool(moved[0])]}, it did not." if how else f"{alone}."
        return (
            f"{when}, and otherwise in each run: by {moved[0]:.3g} in the baseline and by {moved[1]:.3g} in the "
            f"candidate (L2 norms of the changes). Before that it differed by {apart[0]:.3g}, then by {apart[1]:.3g}."
        )

    def _leave(self, given: AlignedStep) -> None:
        """Note the parameters as the step left them; those that no optimizer holds as it found them."""
        baseline, candidate = given.tables
        for key, entry in baseline.items():
            if not self._is_state(key):
                continue
            other = candidate.get(SiteKey(*key))
            if other is None or entry.unobserved or other.unobserved or other.shape != entry.shape:
                self._left.pop(key.path, None)
            else:  # copies: see GradientsTogether
                self._left[key.path] = np.array(entry.summary)[()], np.array(other.summary)[()]
        for path in sorted(self._unheld & given.parameters.keys()):
            pair = given.parameters[path]
            self._left[path] = np.array(pair.baseline.summary)[()], np.array(pair.candidate.summary)[()]
        for pair in given.pairs if self._unheld else ():
            key = pair.baseline.key
            if key.phase == "grad" and key.slot == "grad" and key.path in self._unheld:
                self._gradients[key.path] = max(self._gradients.get(key.path, 0.0), difference(pair) or 0.0)
        self._step = given.step

    @staticmethod
    def _is_state(key: SiteKey) -> bool:
        return key.phase == "param" and not key.stage and key.slot == "value"
