"""The comparison of two runs while they train, on rank 0, and the exchange among ranks that feeds it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from traindiff.analyse.align.two_runs import AlignedStep, TwoRuns
from traindiff.analyse.compare.incremental import ComparedStep, Noise, RunningComparison
from traindiff.analyse.compare.verdict import Comparison, Word, joined_rows
from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.renames import Renaming
from traindiff.analyse.merge.run_steps import StepMerger
from traindiff.analyse.noise.hold_out import Calibrating, following
from traindiff.analyse.noise.measured import NoiseRun, StepNoise
from traindiff.analyse.noise.tolerance import TolerancesByPhase
from traindiff.core.maps.accepted import NONE_ACCEPTED, AcceptedDifferences
from traindiff.core.maps.entries import Entry
from traindiff.core.steps import ALL_STEPS
from traindiff.errors import LockstepError, TraindiffError
from traindiff.run.lockstep.live_side import LiveSide
from traindiff.run.lockstep.live_steps import LiveRun, LiveSteps, RunMessage
from traindiff.run.lockstep.ranks import Ranks
from traindiff.storage import Recording, StepObservations

_StepKey = tuple[str, int]


class LiveComparison:
    """Compares a baseline and a candidate, step by step, and measures noise with replicas of the baseline.

    Args:
        names: Names of the runs: baseline, candidate, and replicas.
        world_size: Number of ranks.
        tolerances: The user's tolerances in place of noise floors.
        rename: Turns the candidate's paths into the baseline's.
        noise: Recordings of further correct runs of the baseline's training.
        entries: Of a map: which sites of the two are one.
        accepted: Differences that are listed, and not judged.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        world_size: int,
        tolerances: TolerancesByPhase,
        rename: Renaming,
        noise: Sequence[Recording] = (),
        entries: Sequence[Entry] = (),
        accepted: AcceptedDifferences = NONE_ACCEPTED,
    ) -> None:
        self.runs = [LiveRun(name, world_size) for name in names]
        self._replicas = [LiveSteps() for _ in names[2:]]
        self._recorded = noise
        self._tolerances = tolerances
        self._rename = rename
        self._entries = entries
        self._accepted = accepted
        self._mergers: list[StepMerger] = []
        self._noise: _LiveNoise | None = None
        self._comparison: RunningComparison | None = None
        self._before: list[Comparison] = []

    def hear(self, messages: Sequence[Sequence[RunMessage]]) -> list[ComparedStep]:
        """Compare the steps that all ranks have ended.

        Args:
            messages: By rank, then by run.

        Raises:
            LockstepError: Only one of the two runs has ended a step.
            ConfigError: A noise recording is of another training.
        """
        of_runs: list[dict[_StepKey, list[StepObservations]]] = [{} for _ in self.runs]
        for rank, message in enumerate(messages):
            for run, steps, one in zip(self.runs, of_runs, message, strict=True):
                run.hear(rank, run=one.run, content=one.content)
                for seen in one.steps:
                    steps.setdefault((seen.optimizer, seen.step), []).append(seen)
        self._refuse_steps_alone(of_runs[0], of_runs[1])
        comparison = self._begun()
        merged = [
            {key: merger.merged(found) for key, found in steps.items()}
            for merger, steps in zip(self._mergers, of_runs, strict=True)
        ]
        for replica, own in zip(self._replicas, merged[2:], strict=True):
            for step in own.values():
                replica.add(step)
        compared = (comparison.feed(merged[0][key], merged[1][key]) for key in sorted(merged[0]))
        return [one for one in compared if one is not None]

    def begin_again(self) -> None:
        """Start a new comparison, after the candidate was reset to the baseline's state."""
        if self._comparison is not None:
            self._before.append(self._comparison.result())
        self._comparison = None

    def result(self) -> Comparison:
        """The comparison of all steps so far."""
        found = [*self._before, *([] if self._comparison is None else [self._comparison.result()])]
        if not found:
            return self._begun().result()
        return joined(found)

    @property
    def trainable_parameters(self) -> list[str]:
        """Paths of the baseline's trainable parameters, in its order."""
        baseline = self.runs[0]
        held = (baseline.rank_content(rank)["parameters"].items() for rank in baseline.ranks)
        return list(dict.fromkeys(path for one in held for path, about in one if about["requires_grad"]))

    @property
    def latest(self) -> Comparison:
        """The comparison since the candidate was last reset."""
        return self._begun().result()

    def _begun(self) -> RunningComparison:
        if self._comparison is None:
            two = TwoRuns((self.runs[0], self.runs[1]), self._rename, ALL_STEPS, self._entries)
            self._mergers = [
                StepMerger(run, copies)
                for run, copies in zip(self.runs, (*two.copies, *({} for _ in self._replicas)), strict=True)
            ]
            if self._noise is None and (self._replicas or self._recorded):
                live: list[NoiseRun] = list(zip(self.runs[2:], self._replicas, strict=True))
                self._noise = _LiveNoise(
                    Calibrating(self.runs[0], [*live, *following(self._recorded)], two.map.sides[0])
                )
            self._comparison = RunningComparison(
                two, tolerance=self._tolerances, noise=self._noise, accepted=self._accepted
            )
        return self._comparison

    def _refuse_steps_alone(self, baseline: Mapping[_StepKey, object], candidate: Mapping[_StepKey, object]) -> None:
        for name, other, alone in (
            ("baseline", "candidate", baseline.keys() - candidate.keys()),
            ("candidate", "baseline", candidate.keys() - baseline.keys()),
        ):
            if alone:
                optimizer, step = min(alone)
                raise LockstepError(
                    f"The {name} has ended step {step} of {optimizer} in a batch in which the {other} has not: the two "
                    "accumulate gradients over different numbers of batches, or their optimizers are called by other "
                    "names. Give both the same gradient_accumulation_steps, or a step(batch) that takes whole steps."
                )


class _LiveNoise(Noise):
    """The noise of replicas that train beside the baseline; its calibration grows with each step."""

    def __init__(self, calibrating: Calibrating) -> None:
        self._calibrating = calibrating
        self._first = True

    def of_step(self, given: AlignedStep) -> StepNoise | None:
        """See `Noise`."""
        noise = self._calibrating.see(given.baseline, given.recorded[0], first=self._first)
        self.earlier = self._calibrating.earlier
        if self._first:
            self._calibrating.refuse_what_does_not_align()
        self._first = False
        self.calibration = self._calibrating.calibration()
        covered = (given.baseline.optimizer, given.step) in self.calibration.covered
        return noise if covered else None


def joined(comparisons: Sequence[Comparison]) -> Comparison:
    """One comparison of all steps, made of consecutive ones."""
    *_, last = comparisons
    if len(comparisons) == 1:
        return last
    words: list[Word] = [one.verdict for one in comparisons]
    findings: list[Finding] = [finding for one in comparisons for finding in one.findings]
    return replace(
        last,
        verdict=max(words, key=_WORST_LAST.index),
        calibrated=all(one.calibrated for one in comparisons),
        findings=tuple(findings),
        unaligned=(
            tuple(dict.fromkeys(one for part in comparisons for one in part.unaligned[0])),
            tuple(dict.fromkeys(one for part in comparisons for one in part.unaligned[1])),
        ),
        steps=tuple(dict.fromkeys(step for one in comparisons for step in one.steps)),
        notes=tuple(dict.fromkeys(note for one in comparisons for note in one.notes)),
        differences=joined_rows(row for one in comparisons for row in one.differences),
        zooms=tuple(zoom for one in comparisons for zoom in one.zooms),
        first_bit_difference=next(filter(None, (one.first_bit_difference for one in comparisons)), None),
    )


_WORST_LAST = ("identical", "equivalent", "incomplete", "misaligned", "diverged")
"""Verdicts, the worst last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a batch.

    Attributes:
        diverged: True if there is a finding.
        compared: The compared steps; on rank 0 only.
        losses: Mean losses of baseline and candidate over ranks; None if nobody asked.
    """

    diverged: bool = False
    compared: tuple[ComparedStep, ...] = ()
    losses: tuple[float, float] | None = None


class Exchange:
    """Sends the ranks' observations to rank 0 and the outcome back."""

    def __init__(self, ranks: Ranks, sides: Sequence[LiveSide], comparison: LiveComparison) -> None:
        self._ranks = ranks
        self._sides = sides
        self._comparison = comparison
        self._compare(self._sent([side.message() for side in sides]))  # the ranks' contents, before any step

    def after_batch(self, *, wants_losses: bool) -> Outcome:
        """Compare the steps that the batch has ended. With `wants_losses`, or after a step, the losses are read too.

        Raises:
            LockstepError: Ranks, or sides, have ended different steps.
            TraindiffError: They cannot be compared.
        """
        own = sum(side.num_waiting for side in self._sides)
        asked = wants_losses or own > 0
        losses = [side.loss_number for side in self._sides[:2]] if asked else [0.0, 0.0]
        waiting, *rest = zip(*self._ranks.meet([own, *losses]), strict=True)
        means = (_mean(rest[0]), _mean(rest[1])) if asked else None
        if len(set(waiting)) > 1:
            odd = next(rank for rank, number in enumerate(waiting) if number != waiting[0])
            raise LockstepError(
                f"Rank {odd} has ended {waiting[odd]:g} steps in this batch, all runs together, and rank 0 has ended "
                f"{waiting[0]:g}: optimizers must step on all ranks in the same batches."
            )
        if not own:
            return Outcome(losses=means)
        diverged, compared = self._compare(self._sent([side.message() for side in self._sides]))
        return Outcome(diverged=diverged, compared=compared, losses=means)

    def losses(self) -> tuple[float, float]:
        """Mean losses of the latest batch over ranks, the baseline's first."""
        baseline, candidate = zip(*self._ranks.meet([side.loss_number for side in self._sides[:2]]), strict=True)
        return _mean(baseline), _mean(candidate)

    def begin_again(self) -> None:
        """Start a new comparison, after the candidate was reset to the baseline's state."""
        self._comparison.begin_again()

    def result(self) -> Comparison:
        """The comparison of all steps so far, on every rank."""
        made = pickle.dumps(self._comparison.result()) if self._ranks.rank == 0 else None
        found: Comparison = pickle.loads(self._ranks.share(made))
        return found

    def _sent(self, message: list[RunMessage]) -> list[list[RunMessage]] | None:
        """The messages of all ranks on rank 0, None on the others."""
        if self._ranks.size == 1:
            return [message]
        found = self._ranks.gather(pickle.dumps(message))
        return None if found is None else [pickle.loads(one) for one in found]

    def _compare(self, messages: list[list[RunMessage]] | None) -> tuple[bool, tuple[ComparedStep, ...]]:
        compared: tuple[ComparedStep, ...] = ()
        error: TraindiffError | None = None
        if messages is not None:
            try:
                compared = tuple(self._comparison.hear(messages))
            except TraindiffError as found:
                error = found
        message = {"diverged": any(one.findings for one in compared), "error": str(error) if error else ""}
        told = json.loads(self._ranks.share(json.dumps(message).encode() if self._ranks.rank == 0 else None))
        if error is not None:
            raise error
        if told["error"]:
            raise LockstepError(told["error"])
        return bool(told["diverged"]), compared


def _mean(losses: Sequence[float]) -> float:
    return sum(losses) / len(losses)
