"""Judge one step: measure every aligned site against its floor, in execution order."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from traindiff.analyse.align import exact
from traindiff.analyse.compare.case import Case, Diagnosis
from traindiff.analyse.compare.diagnosis import diagnose
from traindiff.analyse.compare.factors import clipping_left_out, factor_meaning
from traindiff.analyse.compare.gradient_sums import with_causes
from traindiff.analyse.compare.judge import OTHER_FORM, Judge, comes_last
from traindiff.analyse.compare.mixtures import Mixture, common_mixture
from traindiff.analyse.compare.moved_moments import systematic
from traindiff.analyse.compare.other_loss import BehindOtherLoss, loss_behind
from traindiff.analyse.compare.step_input import StepInput
from traindiff.analyse.compare.uncalled import COUNTED_CALLS, count_of_uncalled, is_uncalled
from traindiff.analyse.compare.unlike import unlike
from traindiff.analyse.findings import Finding, factor_text, ranks_text
from traindiff.analyse.merge.distance import (
    Pair,
    best_fit,
    difference,
    differing_ranks,
    measure,
    num_losses,
    rescaled,
)
from traindiff.analyse.merge.site import SiteKey, finding_at, only_rank
from traindiff.analyse.noise.gradients import common_factor
from traindiff.analyse.noise.moments import Moved
from traindiff.analyse.noise.site_floors import SiteFloors
from traindiff.core.observation import ALL_GRADIENTS, is_of_evaluation
from traindiff.core.summary import norm_of, rounding

_ALL_NOISE = 2.0
"""How much larger noise may be in one run than in the other, where a number is smaller than its noise.

Floors are relative to the baseline, so which of the two runs that is would decide otherwise.
"""

LOGGED = "logged"
"""Slot of the numbers that a training reports."""


def judge_step(judge: Judge, given: StepInput) -> list[Finding]:
    """Judge a step, add it to `judge`, and return its own findings in order. Steps must be given in order."""
    measure(given.pairs)
    judge.run.settings_differ |= any(finding.kind == "hyper-parameter" for finding in given.found)
    judge.every_bit = bool(given.every_bit)
    judge.begin(given.optimizer, given.step)
    judge.run.at(given.optimizer, given.step, begun=given.step - given.steps_before if given.first else None)
    if given.first:
        judge.run.permuted |= exact.permuted_paths(given.pairs)
    if given.first and given.drift == math.inf:
        judge.run.disturbed |= exact.other_parameters(given.pairs)
    edited = (one for one in given.found if one.kind == "edited")
    judge.run.disturbed.update(path for one in edited for path in one.evidence["paths"])
    lacking = (one for one in given.found if one.kind in ("missing", "extra") and not is_uncalled(one))
    judge.absent.update(finding.path for finding in lacking)
    judge.uncalled.update(finding.path for finding in given.found if is_uncalled(finding))
    floors = SiteFloors(
        judge.run, parameters=given.parameters, pairs=given.pairs, samples=given.samples,
        micro_steps=given.most_micro_steps, noise=given.noise, calibration=given.calibration, forced=judge.forced,
        leaky=given.leaky, classes=given.classes, holders=given.holders, unplaced=given.unplaced,
        unpaired=given.unpaired, hidden=given.hidden, computed_in=given.computed_in, other_form=given.other_form,
        calls=given.calls, clipped=given.clip, searches=given.searches,
        alignments=given.alignments,
    )  # fmt: skip
    is_judged = given.noise is not None or judge.findings or (given.first and given.drift == math.inf)
    if (
        given.parameters_known
        and not is_judged
        and (parted := floors.parted_unseen(given.drift if given.first else 0.0))
    ):
        judge.parted[judge.run.judged_before, given.step] = parted
    judged = with_causes((*given.found, *StepJudge(judge, given, floors).judge()))
    found = sorted(judged, key=lambda finding: finding.order)
    floors.finish()
    if all(map(comes_last, judge.findings)):  # else they may follow from the first divergence
        numeric = next((finding for finding in found if not comes_last(finding)), None)
        if numeric is not None and (behind := loss_behind(numeric, given.pairs)) is not None:
            loss, of_loss = behind
            judge.note(loss, given.step, of_loss.difference, of_loss.floor, of_loss.floor)
            found.insert(found.index(numeric), of_loss)
        first = math.inf if numeric is None else numeric.order
        judge.choices += [
            f"step {given.step}, {one.where}: at least {one.turned:,} of {one.rows:,}"
            for one in floors.choices.explained
            if one.order < first
        ]
    if judge.forced and any(finding.slot != LOGGED for finding in found):
        # Logged numbers cannot be forced, so they may follow from the other findings.
        found = [finding for finding in found if finding.slot != LOGGED]
    if given.evaluation is not None:
        found = [
            replace(finding, evaluation=given.evaluation) if _is_of_evaluation(finding, given) else finding
            for finding in found
        ]
    judge.add(found)
    judge.remember(given.optimizer, (pair.baseline for pair in given.pairs), whole=given.whole)
    return found


def _is_of_evaluation(finding: Finding, given: StepInput) -> bool:
    """True if the number of the evaluation belongs to the place of a finding."""
    if finding.evaluation is not None:
        return False
    return is_of_evaluation(finding.phase, finding.stage) or (finding.phase == "update" and not given.whole)


_NO_FIT = 0.5
"""A difference of which the best-fitting multiple of the baseline leaves more than this is no constant factor."""


class StepJudge:
    """Judges one step, site by site, in execution order.

    Args:
        judge: Knows earlier steps; this step is added.
        given: The step.
        floors: Of its sites.
    """

    def __init__(self, judge: Judge, given: StepInput, floors: SiteFloors) -> None:
        self._judge = judge
        self._given = given
        self._floors = floors
        self._previous = judge.previous.get(given.optimizer, {})
        self._of_step_before = judge.of_step_before.get(given.optimizer, frozenset())
        self._mixture: Mixture | None = None  # of the gradients that are judged together
        self._left_out: list[tuple[float, str]] = []  # factors of gradients that one run's clipping leaves out
        self._behind_loss = BehindOtherLoss(given.pairs)
        self._agreeing: set[str] = set()  # parameters of which all agrees that their update is computed from

    def judge(self) -> list[Finding]:
        """Findings of the step. Gradients of one optimizer call are judged together."""
        found: list[Finding | None] = []
        gradients: list[Pair] = []
        drawn = {finding.order for finding in self._given.found if finding.kind in ("random-state", "batch")}
        first_drawn = min(drawn, default=math.inf)
        first: Finding | None = None
        for pair in self._given.pairs:
            key = pair.baseline.key
            compared = key.path != "rng" or pair.baseline.order in drawn  # a state that nothing draws from is of no use
            if compared and self._judge.see_bits(pair, self._given.step, micro_steps=self._given.micro_steps):
                first = self._judge.first_bit_difference
            if pair.baseline.order >= first_drawn:
                self._floors.saw_other_inputs(math.inf)  # what comes before does not follow from what is drawn
            judged_together = key.phase == "grad" and key.slot == "grad" and key.stage != "micro"
            if gradients and not (judged_together and key.stage == gradients[0].baseline.key.stage):
                found += self._gradients(gradients)
                gradients = []
            if judged_together:
                gradients.append(pair)
                continue
            found.append(self._pair(pair))
        found += self._gradients(gradients)
        kept = [finding for finding in found if finding is not None]
        if first is not None and not any(map(_at(first), (*kept, *self._given.found))):
            kept.append(replace(first, message=f"{first.message} {self._given.every_bit}"))
        return kept

    def _pair(self, pair: Pair) -> Finding | None:
        key = pair.baseline.key
        if key.path == "rng":
            return None  # compared by `check_random_state`
        if key.phase == "batch":
            return self._batch(pair)
        if key.phase == "param" and key.stage == "before":
            return self._initial(pair)
        size = self._judge.size(pair)
        if size is None:
            return self._whole_numbers(pair)
        if self._is_turned(pair):
            self._note_turned(pair)
            return None
        if key.phase == "param" and key.slot == "value" and not self._judge.judges_parameters:
            return None  # it follows from the parameter before the step and the update
        floor = self._floors.of(pair)
        if size > floor and self._floors.choices.at(pair) is not None:
            self._note_turned(pair)
            return None
        moved = self._moved(pair, size, floor)
        self._saw(pair, size)
        if key.path in self._judge.absent or (self._judge.other_loss and self._behind_loss.follows(key)):
            floor, moved = math.inf, None  # it follows from what one run lacks, or from the loss
        finding = self._finding(pair, size, floor, moved=moved)
        if finding is not None:
            self._floors.disturb(pair)
        return None if key.path in self._judge.absent else finding

    def _saw(self, pair: Pair, size: float) -> None:
        if pair.baseline.key.path in self._judge.run.disturbed:
            self._agreeing.discard(pair.baseline.key.path)
        self._floors.saw(pair, size)

    def _batch(self, pair: Pair) -> Finding | None:
        finding, apart, floor = self._judge.check_batch(pair, self._given)
        self._judge.note(pair, self._given.step, apart, floor, floor)
        if finding is not None and self._given.other_form:
            return replace(finding, evidence={**finding.evidence, OTHER_FORM: True})
        # All later differences of this step may follow from the batch.
        self._floors.saw_other_inputs(apart, noise=finding is None)
        return finding

    def _initial(self, pair: Pair) -> Finding | None:
        if not self._given.first or pair.baseline.key.slot != "value":
            return None
        given, size = self._given, difference(pair) or 0.0
        may_be_drift = given.drift < math.inf
        finding = exact.check_initial_parameter(
            pair, step=given.step, steps_before=given.steps_before, may_be_drift=may_be_drift
        )
        if may_be_drift and finding is None:
            return None  # it follows from the steps before
        floor = 0.0 if finding else exact.rounding_apart(pair)
        if finding is None and size and exact.starts_rounded(pair):
            floor = size
            self._judge.rounded[pair.baseline.key.path] = size
        if self._judge.judges_parameters and size <= self._judge.floor(pair, 0.0):
            finding, floor = None, self._judge.floor(pair, 0.0)
        self._judge.note(pair, self._given.step, size, floor, floor)
        return finding

    def _whole_numbers(self, pair: Pair) -> Finding | None:
        """Indices and masks have no distance; they may flip only if an input differs."""
        module, _, name = pair.baseline.key.path.rpartition(".")
        if name == COUNTED_CALLS and module in self._judge.uncalled:
            counted = self._finding(pair, math.inf, 0.0)
            return None if counted is None else count_of_uncalled(counted)
        if not self._floors.inputs_differ:
            return self._finding(pair, math.inf, 0.0)
        undisturbed = math.inf if self._floors.noise_at_inputs else 0.0
        self._judge.note(pair, self._given.step, math.inf, math.inf, undisturbed)
        return None

    def _is_turned(self, pair: Pair) -> bool:
        """True if other inputs explain that a choice (of a router, a mask) picked another number of rows."""
        key, baseline, candidate = pair.baseline.key, pair.baseline.shape, pair.candidate.shape
        if baseline != candidate and key.phase in ("forward", "backward") and self._floors.choices.at(pair) is not None:
            return True
        before = None if baseline == candidate else self._previous.get(key)
        if before is None or key.phase not in ("forward", "backward"):
            return False
        depends_on_data = int(before["count"]) != int(pair.baseline.summary["count"])
        if not depends_on_data or len(baseline) != len(candidate) or baseline[1:] != candidate[1:]:
            return False
        return abs(baseline[0] - candidate[0]) <= self._floors.turned_rows(baseline[0])

    def _note_turned(self, pair: Pair) -> None:
        baseline, step = pair.baseline, self._given.step
        if self._floors.choices.at(pair) is not None:  # the floors of what is computed from these rows allow for it
            self._judge.note(pair, step, math.inf, math.inf, math.inf)
            return
        if not self._floors.parted:  # else the choice follows from the first divergence
            self._judge.turned.append(
                f"step {step}, {baseline.key.phase} of {baseline.key.path} {baseline.key.slot}: "
                f"{pair.candidate.shape[0]} rows, {baseline.shape[0]} in the baseline"
            )
        rows = baseline.shape[0]
        noise = abs(rows - pair.candidate.shape[0]) <= self._floors.turned_rows(rows, undisturbed=True)
        self._judge.note(pair, step, math.inf, math.inf, math.inf if noise else 0.0)
        self._floors.saw(pair, math.inf, found=not noise)

    def _gradients(self, pairs: list[Pair]) -> list[Finding | None]:
        if not pairs:
            return []
        floors = {pair.baseline.key: self._floors.of(pair) for pair in pairs}
        self._mixture = common_mixture(pairs, self._previous)
        by_user = self._judge.is_judged_by_user(pairs[0])
        factor, limits = (None, {}) if by_user or self._mixture else self._common_factor(pairs, floors)
        self._left_out = clipping_left_out(*self._given.coefficients, common=factor or 1.0)
        found: list[Finding] = []
        seen: list[tuple[Pair, float]] = []
        for pair in pairs:
            whole = self._judge.size(pair)
            judged = pair if factor is None else rescaled(pair, factor)
            size = self._judge.size(judged)
            if whole is None or size is None:
                continue
            seen.append((pair, max(whole, size)))
            key = pair.baseline.key
            floor = math.inf if self._judge.other_loss and self._behind_loss.follows(key) else floors[key]
            finding = self._finding(judged, size, floor, observed=pair, moved=self._moved(judged, size, floor))
            if finding:
                found.append(finding)
        at = {(finding.path, finding.stage) for finding in found}
        for pair, size in seen:
            self._agreeing.add(pair.baseline.key.path)
            self._floors.saw(pair, size, found=(pair.baseline.key.path, pair.baseline.key.stage) in at)
        if factor is None:
            return list(found)
        if not found and self._judge.absent:
            return []  # clipping to a norm that lacks a gradient
        if not found:
            # Clipping may round the norm of all gradients to the dtype of each: by at most one unit in the last place.
            rounds = limits is not floors and abs(factor - 1.0) <= 2.0 * rounding(pairs[0].baseline.dtype)
            return [] if rounds else [self._all_gradients(pairs, factor, limits)]
        clipping = ", as clipping to a norm makes them" if self._given.clips else ""
        aside = (
            f" (All other gradients are {factor_text(factor)} x the baseline's{clipping}; that is divided out here.)"
        )
        return [replace(finding, message=finding.message + aside) for finding in found]

    def _common_factor(
        self, pairs: Sequence[Pair], floors: Mapping[SiteKey, float]
    ) -> tuple[float | None, Mapping[SiteKey, float]]:
        """The factor that most gradients share, if any, and the floors above which it is: of elements, or of norms."""
        fits = [best_fit(pair.baseline, pair.candidate)[0] for pair in pairs]
        own = [self._factor_floor(one, self._judge.size(one) or 0.0, floors[one.baseline.key]) for one in pairs]
        factor = common_factor(fits, own)
        if factor is not None:
            return factor, floors
        limits = {
            pair.baseline.key: (limit, norm_of(pair.candidate.summary) / norm_of(pair.baseline.summary))
            for pair in pairs
            if (limit := self._floors.norm_limit(pair, floors[pair.baseline.key])) is not None
        }
        factor = common_factor([ratio for _, ratio in limits.values()], [limit for limit, _ in limits.values()])
        return factor, {key: limit for key, (limit, _) in limits.items()}

    def _all_gradients(self, pairs: list[Pair], factor: float, floors: Mapping[SiteKey, float]) -> Finding:
        first = pairs[0]
        size, floor = abs(factor - 1.0), min(floors.values())
        finding = self._as_finding(first, size, floor, self._shape(first, size, floor))
        meaning = factor_meaning(factor, self._given.micro_steps, self._given.ranks, self._factors(first))
        message = f"All gradients are {factor_text(factor)} x the baseline's{meaning}."
        evidence = {**finding.evidence, "factor": factor, "parameters": len(pairs)}
        if self._given.clips_in_one:  # the other one clips in another way, which is where to look
            finding = replace(finding, path=ALL_GRADIENTS, slot="norm")
        return replace(finding, kind="scale", message=message, evidence=evidence)

    def _moved(self, pair: Pair, size: float, floor: float) -> Moved | None:
        """The norm or sum of a pair that is within its floor, if it moved further than rounding moves it."""
        follows = size > self._floors.undisturbed(pair)  # then no rounding moved it
        within = size <= floor and not follows
        return self._floors.moved(pair, floor) if within and self._judge.tolerance is None else None

    def _finding(
        self, pair: Pair, size: float, floor: float, *, observed: Pair | None = None, moved: Moved | None = None
    ) -> Finding | None:
        """A finding if the difference exceeds its floor, or if the norm or the sum moved too far.

        Args:
            pair: Both sides.
            size: Their difference.
            floor: Its floor.
            observed: The pair before it was rescaled.
            moved: Norm or sum that moved too far.
        """
        undisturbed = self._judge.floor(pair, self._floors.undisturbed(pair))
        floor = self._judge.floor(pair, floor)
        # What follows from a divergence may be a constant factor. It is not bounded as strictly as noise, either.
        floor = _FURTHER * floor if undisturbed < floor else self._factor_floor(pair, size, floor)
        floor *= _ALL_NOISE if floor > 1.0 else 1.0
        moved = moved if size <= floor else None
        shown = (size, floor) if moved is None else (moved.apart, moved.floor)
        self._judge.note(observed or pair, self._given.step, *shown, undisturbed)
        baseline = pair.baseline
        if int(baseline.summary["nan"]) and int(pair.candidate.summary["nan"]) and math.isfinite(size):
            where = f"step {self._given.step}, {baseline.key.phase} of {baseline.key.path} {baseline.key.slot}"
            self._judge.nan_in_both.append(where)
        if moved is not None:
            return self._as_finding(pair, *shown, systematic(pair, moved))
        if not size > floor:
            return None
        self._judge.other_loss |= baseline.key.phase == "loss" and not self._judge.forced
        finding = self._as_finding(pair, size, floor, self._shape(pair, size, floor))
        if not undisturbed < floor or baseline.key.slot == "buffer":  # which may be a copy of another one
            return finding
        # Its inputs differ, too.
        return replace(
            finding, message=finding.message + _INDEPENDENT, evidence={**finding.evidence, "independent": True}
        )

    def _factor_floor(self, pair: Pair, size: float, floor: float) -> float:
        """The floor, or a lower one for a difference that is only a constant factor.

        With fewer than 16 elements, the remainder beside the best-fitting multiple is too small to tell.
        """
        baseline = pair.baseline
        by_user = self._judge.is_judged_by_user(pair)
        if not size <= floor < math.inf or by_user or int(baseline.summary["count"]) < 16:
            return floor
        if size <= self._floors.least_factor:  # the factor is no further from 1 than the whole difference
            return floor
        s, left_over = best_fit(baseline, pair.candidate)
        if left_over > _NO_FIT:
            return floor
        lower = self._floors.factor(pair, left_over=left_over)
        return lower if lower < min(floor, abs(s - 1.0)) else floor

    def _as_finding(self, pair: Pair, size: float, floor: float, shape: Diagnosis) -> Finding:
        only = 0 if self._given.micro_steps == 1 else None
        apart = differing_ranks(pair, floor)
        rank = only_rank(pair.candidate) if len(apart) != 1 else apart[0]
        aside = f" Only what {ranks_text(apart, capital=False)} holds differs." if apart else ""
        if pair.baseline.dtype != pair.candidate.dtype:
            aside += f" It is {pair.baseline.dtype} in the baseline and {pair.candidate.dtype} in the candidate."
        if pair.baseline.key.phase == "update" and shape.kind == "value":
            aside += self._beside_gradient(pair.baseline.key.path)
        if (losses := num_losses(pair))[0] != losses[1]:
            aside += f" It adds up other losses: {losses[0]} in the baseline, {losses[1]} in the candidate."
        return finding_at(
            pair.baseline, step=self._given.step, kind=shape.kind, message=shape.message + aside, difference=size,
            floor=floor, rank=rank, micro_step=shape.evidence.get("micro_step", only),
            evidence={
                **shape.evidence,
                **({"losses": losses} if losses[0] != losses[1] else {}),
                "dtype": pair.baseline.dtype,
                "baseline_norm": norm_of(pair.baseline.summary),
                "candidate_norm": norm_of(pair.candidate.summary),
            },
        )  # fmt: skip

    def _beside_gradient(self, path: str) -> str:
        """A sentence on an update that differs although what the optimizer computes it from does not."""
        if path not in self._agreeing or not self._given.whole:
            return ""
        return (
            " Its gradient and the optimizer's state agree: does the optimizer compute the step otherwise, or "
            f"does something else change {path} between the forward pass and the end of the optimizer's step?"
        )

    def _factors(self, pair: Pair) -> tuple[tuple[float, str], ...]:
        """Factors that may explain a difference here: clipping changes nothing before the gradients."""
        clipped = self._given.clipped if pair.baseline.key.phase in ("grad", "optimizer", "update") else ()
        left_out = self._left_out if pair.baseline.key.phase == "grad" else ()
        return (*self._given.factors, *clipped, *left_out)

    def _shape(self, pair: Pair, size: float, floor: float) -> Diagnosis:
        baseline, candidate = pair.baseline, pair.candidate
        if (found := unlike(pair, broken=self._judge.is_broken(pair))) is not None:
            return found
        summed = baseline.key.phase == "grad" and baseline.key.stage in ("", "reduced", "unscaled")
        return diagnose(
            Case(
                baseline=baseline, candidate=candidate, difference=size, floor=floor,
                micro_steps=self._given.micro_steps, ranks=self._given.ranks,
                previous=self._previous.get(baseline.key), mixture=self._mixture, carried=self._given.carried,
                unit="evaluation" if self._given.evaluation and baseline.key not in self._of_step_before else "step",
                contributions=self._given.contributions.get(baseline.key.path, {}) if summed else {},
                expected=self._given.expected.get(baseline.key.path, {}) if summed else {},
                factors=self._factors(pair),
            )
        )  # fmt: skip


_FURTHER = 2.0
"""What follows from a divergence is a further finding if it exceeds what is expected to follow by this factor."""

_INDEPENDENT = " (This is more than is expected to follow from the first divergence.)"


def _at(one: Finding) -> Callable[[Finding], bool]:
    """A function that tells whether a finding is at the place of this one."""
    place = (one.phase, one.stage, one.path, one.slot, one.call)
    return lambda other: (other.phase, other.stage, other.path, other.slot, other.call) == place
