"""Judge the steps of two runs, one after the other."""

from __future__ import annotations

import math
from dataclasses import replace

from traindiff.analyse.align import exact
from traindiff.analyse.compare.judged import Judged
from traindiff.analyse.compare.step_judge import StepInput, StepJudge
from traindiff.analyse.compare.verdict import DifferenceHistory
from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.step_table import Key
from traindiff.analyse.noise.site_floors import RunFloors, SiteFloors
from traindiff.analyse.noise.tolerance import Tolerances

LOGGED = "logged"
"""Slot of the numbers that a training reports."""

FOLLOWS = 0.05
"""Where activations differ by a size d and all gradients together by more than this part of it, they may follow."""


class Judge:
    """Judges the steps of two runs, in order, and keeps what the floors of later steps follow from.

    Args:
        tolerance: Used in place of floors where the user set one.
        calibration: What replicas say about noise in general.
        forced: Whether the candidate was given the baseline's tensors after each operation.
        coefficients: Relative error that the optimizers' own coefficients may have.
        history: Takes note of every difference, where a report is to show them.

    Attributes:
        findings: Everything found so far, in execution order: each site once, with the number of
            steps in which it was found.
        judged: What has been judged so far.
    """

    def __init__(
        self,
        tolerance: Tolerances | None,
        *,
        forced: bool = False,
        coefficients: float = 0.0,
        history: DifferenceHistory | None = None,
    ) -> None:
        self.judged = Judged(tolerance=tolerance, history=history)
        self._forced = forced
        self._found: dict[tuple[Key, str], Finding] = {}
        self._run = RunFloors(coefficients=coefficients)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """See the class."""
        return tuple(self._found.values())

    @property
    def only_representation_differs(self) -> bool:
        """Whether activations, or the order of samples or channels, differ, and no loss, gradient or update does."""
        phases = {row.phase for row in self.judged.differences.values()}
        learning = bool({"loss", "grad", "update"} - phases) or self._run.learning_differs
        if not self._found or learning or self.judged.tolerance is not None:
            return False
        sizes = [found.difference for found in self._found.values() if math.isfinite(found.difference)]
        if sizes and self._run.learning_apart > FOLLOWS * max(sizes):
            return False  # noise may hide how much the gradients follow
        return all(map(self._is_representation, self._found.values()))

    def _is_representation(self, finding: Finding) -> bool:
        if finding.kind in exact.EXACT_KINDS:
            return bool(finding.evidence.get("permuted"))
        if finding.kind in ("missing", "extra", "non-finite", "shape", "recomputed"):
            return False
        return finding.phase in ("forward", "backward") or finding.path in self._run.permuted

    def judge(self, given: StepInput) -> list[Finding]:
        """Judge a step: extends `findings` and `differences`. Gives the findings of this step alone, in order."""
        self._run.settings_differ |= any(finding.kind == "hyper-parameter" for finding in given.found)
        if given.first:
            self._run.permuted |= exact.permuted_paths(given.pairs)
        self.judged.absent.update(finding.path for finding in given.found if finding.kind in ("missing", "extra"))
        floors = SiteFloors(
            self._run,
            parameters=given.parameters,
            pairs=given.pairs,
            samples=given.samples,
            micro_steps=given.most_micro_steps,
            noise=given.noise,
            calibration=given.calibration,
            forced=self._forced,
        )
        if any(finding.kind == "random-state" for finding in given.found):
            floors.saw_other_inputs(math.inf)
        step = StepJudge(self.judged, given, floors)
        found = sorted((*given.found, *step.judge()), key=lambda finding: finding.order)
        floors.finish()
        if self._forced and any(finding.slot != LOGGED for finding in found):
            # What the training reports cannot be forced: it may follow from what was found before it.
            found = [finding for finding in found if finding.slot != LOGGED]
        for finding in found:
            site = (_key(finding), finding.kind if finding.kind in ("hyper-parameter", "reported-norm") else "")
            held = self._found.get(site)
            count = held.evidence["num_steps"] + 1 if held else 1
            self._found[site] = replace(held or finding, evidence={**(held or finding).evidence, "num_steps": count})

        self.judged.previous = {
            pair.baseline.key: pair.baseline.summary
            for pair in given.pairs
            if pair.baseline.key.phase in ("forward", "backward", "grad", "optimizer")
        }
        return found


def _key(finding: Finding) -> Key:
    return Key(finding.phase, finding.stage, finding.path, finding.slot, finding.call, 0)
