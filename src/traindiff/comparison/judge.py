"""Judge one step: measure every aligned site against its floor, in execution order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from traindiff.alignment import exact
from traindiff.alignment.gradient_norms import GRADIENT_NORM
from traindiff.alignment.ranks import differing_ranks
from traindiff.comparison.diagnosis import Case, Diagnosis, diagnose, factor_meaning, factor_text
from traindiff.comparison.verdict import SiteDifference
from traindiff.findings.finding import Finding
from traindiff.findings.sentences import ranks_text
from traindiff.floors.calibration import Calibration
from traindiff.floors.gradients import common_factor
from traindiff.floors.replicas import StepNoise
from traindiff.floors.site_floors import RunFloors, SiteFloors
from traindiff.floors.tolerance import Tolerance
from traindiff.merging.distance import Pair, best_fit, difference, equal_bits, rescaled
from traindiff.merging.finding_at import finding_at
from traindiff.merging.samples import Samples
from traindiff.merging.step_table import Key, only_rank
from traindiff.summary import norm

LOGGED = "logged"
"""Slot of the numbers that a training reports."""


FOLLOWS = 0.05
"""Where activations differ by a size d and all gradients together by more than this part of it, they may follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """What is known of a step before it is judged.

    Attributes:
        step: Its number.
        first: Whether it is the first step that is compared.
        pairs: Aligned entries in the baseline's execution order.
        found: Findings of the step that need no measuring.
        contributions: By path: what each micro-batch of the candidate brought to a gradient.
        parameters: By path: the parameters as this step found them, on both sides.
        micro_steps: Micro-batches in the candidate's step.
        most_micro_steps: The same of the run that has more of them.
        ranks: Over how many ranks the batch is divided, in the run that has more of them.
        samples: Elements in the baseline's batch.
        batches: The single samples of both runs' batches.
        noise: What replicas of the baseline differ by in this step; None without them.
        factors: Factors of which something is known, and what to say of them.
    """

    step: int
    first: bool
    pairs: tuple[Pair, ...]
    found: tuple[Finding, ...]
    contributions: Mapping[str, Mapping[tuple[int, int], Any]]
    parameters: Mapping[str, Pair]
    micro_steps: int
    most_micro_steps: int
    ranks: int
    samples: int
    batches: tuple[Samples, Samples] = ({}, {})
    noise: StepNoise | None = None
    factors: tuple[tuple[float, str], ...] = ()


class Judge:
    """Judges the steps of two runs, in order, and keeps what the floors of later steps follow from.

    Args:
        tolerance: Used in place of floors where the user set one.
        calibration: What replicas say about noise in general.
        forced: Whether the candidate was given the baseline's tensors after each operation.
        coefficients: Relative error that the optimizers' own coefficients may have.

    Attributes:
        findings: Everything found so far, in execution order: each site once, with the number of
            steps in which it was found.
        differences: Largest difference of each site so far, in units of its floor.
        all_equal: Whether every pair so far held the same bits.
        previous: The baseline's summaries in the step before, by site.
        nan_in_both: Where both runs hold NaN at the same places.
        turned: Where a choice that rounding may turn picked another number of rows.
    """

    def __init__(
        self,
        tolerance: Tolerance | None,
        calibration: Calibration,
        *,
        forced: bool = False,
        coefficients: float = 0.0,
    ) -> None:
        self._tolerance = tolerance
        self._calibration = calibration
        self._forced = forced
        self._found: dict[tuple[Key, str], Finding] = {}
        self.previous: dict[Key, Any] = {}
        self._run = RunFloors(coefficients=coefficients)
        self.differences: dict[Key, SiteDifference] = {}
        self.all_equal = True
        self.nan_in_both: list[str] = []
        self.turned: list[str] = []
        self._absent: set[str] = set()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """See the class."""
        return tuple(self._found.values())

    @property
    def only_representation_differs(self) -> bool:
        """Whether activations, or the order of samples or channels, differ, and no loss, gradient or update does."""
        phases = {row.phase for row in self.differences.values()}
        learning = bool({"loss", "grad", "update"} - phases) or self._run.learning_differs
        if not self._found or learning or self._tolerance is not None:
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

    def judge(self, given: StepInput) -> None:
        """Judge a step: extends `findings` and `differences`."""
        self._run.settings_differ |= any(finding.kind == "hyper-parameter" for finding in given.found)
        if given.first:
            self._run.permuted |= exact.permuted_paths(given.pairs)
        self._absent.update(finding.path for finding in given.found if finding.kind in ("missing", "extra"))
        floors = SiteFloors(
            self._run,
            parameters=given.parameters,
            pairs=given.pairs,
            samples=given.samples,
            micro_steps=given.most_micro_steps,
            noise=given.noise,
            calibration=self._calibration,
            forced=self._forced,
        )
        if any(finding.kind == "random-state" for finding in given.found):
            floors.saw_other_inputs(math.inf)
        step = _Step(self, given, floors)
        found = sorted((*given.found, *step.judge()), key=lambda finding: finding.order)
        floors.finish()
        if self._forced and any(finding.slot != LOGGED for finding in found):
            # What the training reports cannot be forced: it may follow from what was found before it.
            found = [finding for finding in found if finding.slot != LOGGED]
        for finding in found:
            site = (_key(finding), finding.kind if finding.kind in ("hyper-parameter", "reported-norm") else "")
            held = self._found.get(site)
            steps = held.evidence["steps"] + 1 if held else 1
            self._found[site] = replace(held or finding, evidence={**(held or finding).evidence, "steps": steps})

        self.previous = {
            pair.baseline.key: pair.baseline.summary
            for pair in given.pairs
            if pair.baseline.key.phase in ("forward", "backward", "grad", "optimizer")
        }

    def floor(self, pair: Pair, floor: float) -> float:
        """The floor of a pair, or what the user's tolerances make of it."""
        counter = pair.baseline.key.slot == "step"
        return floor if self._tolerance is None or counter else self._tolerance.floor(pair)

    def note(self, pair: Pair, step: int, size: float, floor: float) -> None:
        """Remember the largest difference of a site."""
        key = pair.baseline.key
        equal = equal_bits(pair) or (size == 0.0 and not pair.baseline.exact)
        derived = key.phase == "update" or key == GRADIENT_NORM  # adds nothing to what it is derived from
        self.all_equal = self.all_equal and (equal or derived)
        row = SiteDifference(
            phase=key.phase, stage=key.stage, path=key.path, slot=key.slot, call=key.call, step=step,
            order=pair.baseline.order, difference=size, floor=floor, steps=0, identical_steps=0,
        )  # fmt: skip
        held = self.differences.get(key, row)
        worst = row if row.ratio > held.ratio else held
        self.differences[key] = replace(worst, steps=held.steps + 1, identical_steps=held.identical_steps + equal)

    def is_absent(self, path: str) -> bool:
        """Whether one run does not train this parameter, so that what follows needs no further word."""
        return path in self._absent

    @property
    def is_any_absent(self) -> bool:
        """Whether one run does not train some parameter."""
        return bool(self._absent)


class _Step:
    """One step while it is judged."""

    def __init__(self, judge: Judge, given: StepInput, floors: SiteFloors) -> None:
        self._judge = judge
        self._given = given
        self._floors = floors
        self._updates: dict[str, tuple[float, bool]] = {}

    def judge(self) -> list[Finding]:
        """Findings of the step, gradients of one optimizer call judged together."""
        found: list[Finding | None] = []
        gradients: list[Pair] = []
        for pair in self._given.pairs:
            key = pair.baseline.key
            judged_together = key.phase == "grad" and key.slot == "grad" and key.stage != "micro"
            if gradients and not (judged_together and key.stage == gradients[0].baseline.key.stage):
                found += self._gradients(gradients)
                gradients = []
            if judged_together:
                gradients.append(pair)
                continue
            found.append(self._pair(pair))
        found += self._gradients(gradients)
        return [finding for finding in found if finding is not None]

    def _pair(self, pair: Pair) -> Finding | None:
        key = pair.baseline.key
        if key.path == "rng":
            return None  # judged with the exact class
        if key.phase == "batch":
            return self._batch(pair)
        if key.phase == "param" and key.stage == "before":
            return self._initial(pair)
        size = difference(pair)
        if size is None:
            return self._whole_numbers(pair)
        if self._is_turned(pair):
            self._turned(pair)
            return None
        if key.phase == "param" and key.slot == "value":
            return self._parameter(pair, size)
        floor = self._floors.of(pair)
        self._floors.saw(pair, size)
        finding = self._finding(pair, size, floor)
        if key.phase == "update":
            self._updates[key.path] = max(size, floor), finding is not None
        return None if self._judge.is_absent(key.path) else finding

    def _batch(self, pair: Pair) -> Finding | None:
        finding = exact.check_batch(pair, step=self._given.step, samples=self._given.batches)
        apart = 0.0 if equal_bits(pair) else difference(pair)
        self._judge.note(pair, self._given.step, math.inf if finding else apart or 0.0, 0.0 if finding else math.inf)
        # Everything that follows in this step follows from other inputs.
        self._floors.saw_other_inputs(math.inf if finding else apart or 0.0)
        return finding

    def _initial(self, pair: Pair) -> Finding | None:
        if not self._given.first or pair.baseline.key.slot != "value":
            return None
        self._judge.note(pair, self._given.step, difference(pair) or 0.0, 0.0)
        return exact.check_initial_parameter(pair, step=self._given.step)

    def _parameter(self, pair: Pair, size: float) -> Finding | None:
        """A parameter after the step, unless what its update brought was judged already."""
        path = pair.baseline.key.path
        update = self._updates.get(path)
        if update is None or update[1] or self._judge.is_absent(path):
            return None  # nothing to hold it against, or it follows from what was said of the update
        floor = self._floors.parameter(pair, update[0])
        if floor is None:
            return None
        self._floors.saw(pair, size)
        return self._finding(pair, size, floor)

    def _whole_numbers(self, pair: Pair) -> Finding | None:
        """Indices and masks have no distance; they may flip only where a difference came in."""
        expected = self._floors.inputs_differ
        self._judge.note(pair, self._given.step, math.inf, math.inf if expected else 0.0)
        return None if expected else self._finding(pair, math.inf, 0.0)

    def _is_turned(self, pair: Pair) -> bool:
        """Whether other inputs explain that a choice (a router's, a mask's) picked another number of rows."""
        key, left, right = pair.baseline.key, pair.baseline.shape, pair.candidate.shape
        before = self._judge.previous.get(key)
        if key.phase not in ("forward", "backward") or left == right or before is None:
            return False
        depends_on_data = int(before["count"]) != int(pair.baseline.summary["count"])
        if not depends_on_data or len(left) != len(right) or left[1:] != right[1:]:
            return False
        return abs(left[0] - right[0]) <= self._floors.turned_rows(left[0])

    def _turned(self, pair: Pair) -> None:
        left, step = pair.baseline, self._given.step
        self._judge.turned.append(
            f"step {step}, {left.key.phase} of {left.key.path} {left.key.slot}: {pair.candidate.shape[0]} rows, "
            f"{left.shape[0]} in the baseline"
        )
        self._judge.note(pair, step, math.inf, math.inf)
        self._floors.saw(pair, math.inf)

    def _gradients(self, pairs: list[Pair]) -> list[Finding | None]:
        if not pairs:
            return []
        floors = {pair.baseline.key: self._floors.of(pair) for pair in pairs}
        factor = None if self._judge.floor(pairs[0], math.nan) >= 0 else common_factor(pairs, floors)
        found: list[Finding] = []
        seen: list[tuple[Pair, float]] = []
        for pair in pairs:
            whole = difference(pair)
            judged = pair if factor is None else rescaled(pair, factor)
            size = difference(judged)
            if whole is None or size is None:
                continue
            seen.append((pair, max(whole, size)))
            finding = self._finding(judged, size, floors[pair.baseline.key], observed=pair)
            if finding:
                found.append(finding)
        for pair, size in seen:
            self._floors.saw(pair, size)
        if factor is None:
            return list(found)
        if not found and self._judge.is_any_absent:
            return []  # clipping to a norm that lacks a gradient
        if not found:
            return [self._all_gradients(pairs, factor, floors)]
        aside = f" (All other gradients are {factor_text(factor)} x the baseline's, as clipping to a norm makes them.)"
        return [replace(finding, says=finding.says + aside) for finding in found]

    def _all_gradients(self, pairs: list[Pair], factor: float, floors: Mapping[Key, float]) -> Finding:
        first = pairs[0]
        size, floor = abs(factor - 1.0), min(floors.values())
        finding = self._as_finding(first, size, floor, self._shape(first, size, floor))
        meaning = factor_meaning(factor, self._given.micro_steps, self._given.ranks, self._given.factors)
        says = f"All gradients are {factor_text(factor)} x the baseline's{meaning}."
        evidence = {**finding.evidence, "factor": factor, "parameters": len(pairs)}
        return replace(finding, kind="scale", says=says, evidence=evidence)

    def _finding(self, pair: Pair, size: float, floor: float, *, observed: Pair | None = None) -> Finding | None:
        """A finding if the difference exceeds its floor. `observed` is the pair before it was rescaled."""
        floor = self._factor_floor(pair, size, self._judge.floor(pair, floor))
        self._judge.note(observed or pair, self._given.step, size, floor)
        left = pair.baseline
        if int(left.summary["nan"]) and int(pair.candidate.summary["nan"]) and math.isfinite(size):
            where = f"step {self._given.step}, {left.key.phase} of {left.key.path} {left.key.slot}"
            self._judge.nan_in_both.append(where)
        if not size > floor:
            return None
        return self._as_finding(pair, size, floor, self._shape(pair, size, floor))

    def _factor_floor(self, pair: Pair, size: float, floor: float) -> float:
        """The floor, or a lower one for a difference that is a constant factor and nothing else.

        Of fewer than 16 elements too little is left beside the best-fitting multiple to tell the two apart.
        """
        left = pair.baseline
        judged_by_user = self._judge.floor(pair, math.nan) >= 0
        if not size <= floor < math.inf or judged_by_user or int(left.summary["count"]) < 16:
            return floor
        s, left_over = best_fit(left, pair.candidate)
        lower = self._floors.factor(pair, left_over=left_over)
        return lower if lower < min(floor, abs(s - 1.0)) else floor

    def _as_finding(self, pair: Pair, size: float, floor: float, shape: Diagnosis) -> Finding:
        only = 0 if self._given.micro_steps == 1 else None
        apart = differing_ranks(pair, floor)
        rank = only_rank(pair.candidate) if len(apart) != 1 else apart[0]
        aside = f" Only what {ranks_text(apart, capital=False)} holds differs." if apart else ""
        return finding_at(
            pair.baseline, step=self._given.step, kind=shape.kind, says=shape.says + aside, difference=size,
            floor=floor, rank=rank, micro_step=shape.evidence.get("micro_step", only),
            evidence={
                **shape.evidence,
                "dtype": pair.baseline.dtype,
                "baseline_norm": float(norm(pair.baseline.summary)),
                "candidate_norm": float(norm(pair.candidate.summary)),
            },
        )  # fmt: skip

    def _shape(self, pair: Pair, size: float, floor: float) -> Diagnosis:
        left, right = pair.baseline, pair.candidate
        if left.shape != right.shape:
            says = f"The shape is {list(left.shape)} in the baseline and {list(right.shape)} in the candidate."
            return Diagnosis(kind="shape", says=says)
        summed = left.key.phase == "grad" and left.key.stage in ("", "reduced", "unscaled")
        return diagnose(
            Case(
                baseline=left, candidate=right, difference=size, floor=floor, micro_steps=self._given.micro_steps,
                ranks=self._given.ranks, previous=self._judge.previous.get(left.key),
                contributions=self._given.contributions.get(left.key.path, {}) if summed else {},
                factors=self._given.factors,
            )
        )  # fmt: skip


def _key(finding: Finding) -> Key:
    return Key(finding.phase, finding.stage, finding.path, finding.slot, finding.call, 0)
