"""The findings of a comparison that are taken apart into operators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from traindiff.comparison.zoom import Zoom
from traindiff.comparison.zooming import ZoomInput, zoom
from traindiff.findings import Finding
from traindiff.merging.operators import operator_runs
from traindiff.merging.renames import Rename
from traindiff.merging.step_table import Part
from traindiff.recording import Run

MOST = 12
"""Findings that are taken apart: those that come first."""

_ZOOMED = ("forward", "backward", "grad")


class Zooms:
    """Takes findings apart while the steps of two runs come.

    Args:
        runs: Baseline and candidate.
        rename: Turns the candidate's paths into the baseline's.

    Attributes:
        found: What was found so far.
    """

    def __init__(self, runs: tuple[Run, Run], rename: Rename) -> None:
        self._runs = runs
        self._rename = rename
        self._tried: set[tuple[str, str, str]] = set()
        self._alone: dict[str, None] = {}
        self.found: list[Zoom] = []

    def see(
        self,
        findings: Iterable[Finding],
        operators: tuple[Sequence[Part], Sequence[Part]],
        noise: Sequence[Sequence[Part]],
    ) -> None:
        """Take the findings of a step apart.

        Args:
            findings: In execution order.
            operators: What baseline and candidate have observed of operators in it.
            noise: The same of noise recordings.
        """
        if not all(operators):
            self._alone["baseline" if operators[0] else "candidate"] = None
            return
        wanted = [one for one in findings if one.phase in _ZOOMED and one.kind not in ("missing", "extra")]
        wanted = [one for one in wanted if (one.phase, one.path, one.slot) not in self._tried]
        room = MOST - len(self.found)
        if not wanted or room <= 0:
            return
        given = ZoomInput(
            runs=(operator_runs(operators[0]), operator_runs(operators[1], self._rename)),
            noise=[operator_runs(one) for one in noise],
            described=(_described(self._runs[0]), _described(self._runs[1])),
        )
        for finding in wanted[:room]:
            self._tried.add((finding.phase, finding.path, finding.slot))
            if (found := zoom(finding, given)) is not None:
                self.found.append(found)

    def told(self, first: Finding) -> Finding:
        """The first finding, which then says what was found inside its module, if anything was."""
        for one in self.found:
            seen_at = (one.step, one.phase, one.path, one.slot)
            if seen_at == (first.step, first.phase, first.path, first.slot) and one.cause != "none":
                evidence = {**first.evidence, "operator": one.operator}
                return replace(first, says=f"{first.says} Inside it: {one.says}", evidence=evidence)
        return first

    @property
    def notes(self) -> list[str]:
        """What limits it, one sentence each."""
        return [f"Only the {run} has recorded operators, so none could be compared." for run in self._alone]


def _described(run: Run) -> dict[int, Mapping[str, Any]]:
    return {rank: run.rank_content(rank).get("operators", {}) for rank in run.ranks}
