"""Two runs compared while they are trained, on rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from traindiff.alignment.two_runs import AlignedStep, TwoRuns
from traindiff.comparison.running import ComparedStep, Noise, RunningComparison
from traindiff.comparison.verdict import Comparison, Word
from traindiff.errors import LockstepError
from traindiff.findings import Finding
from traindiff.floors.calibrating import Calibrating, following
from traindiff.floors.replicas import NoiseRun, StepNoise
from traindiff.floors.tolerance import TolerancesByPhase
from traindiff.lockstep.live_run import LiveRun, LiveSteps
from traindiff.lockstep.message import RunMessage
from traindiff.merging.renames import Renaming
from traindiff.merging.run_steps import StepMerger
from traindiff.recording import Recording, StepObservations
from traindiff.steps import ALL_STEPS

_StepKey = tuple[str, int]


class LiveComparison:
    """Compares a baseline and a candidate, step by step, beside replicas of the baseline.

    Args:
        names: What the runs are called: baseline, candidate, and replicas.
        world_size: Number of ranks.
        tolerances: What the user set in place of floors.
        rename: Turns the candidate's paths into the baseline's.
        noise: Recordings of further correct runs of the baseline's training.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        world_size: int,
        tolerances: TolerancesByPhase,
        rename: Renaming,
        noise: Sequence[Recording] = (),
    ) -> None:
        self.runs = [LiveRun(name, world_size) for name in names]
        self._replicas = [LiveSteps() for _ in names[2:]]
        self._recorded = noise
        self._tolerances = tolerances
        self._rename = rename
        self._mergers: list[StepMerger] = []
        self._noise: _LiveNoise | None = None
        self._comparison: RunningComparison | None = None
        self._before: list[Comparison] = []

    def hear(self, messages: Sequence[Sequence[RunMessage]]) -> list[ComparedStep]:
        """Compare the steps that all ranks have ended, by what each says of each run.

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
        """The candidate was set back to the baseline's state: what comes is compared anew."""
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
    def parameters(self) -> list[str]:
        """Paths of the baseline's parameters, in its order."""
        baseline = self.runs[0]
        return list(
            dict.fromkeys(path for rank in baseline.ranks for path in baseline.rank_content(rank)["parameters"])
        )

    @property
    def latest(self) -> Comparison:
        """The comparison since the candidate was last set back."""
        return self._begun().result()

    def _begun(self) -> RunningComparison:
        if self._comparison is None:
            two = TwoRuns((self.runs[0], self.runs[1]), self._rename, ALL_STEPS)
            self._mergers = [
                StepMerger(run, copies)
                for run, copies in zip(self.runs, (*two.copies, *({} for _ in self._replicas)), strict=True)
            ]
            if self._noise is None and (self._replicas or self._recorded):
                live: list[NoiseRun] = list(zip(self.runs[2:], self._replicas, strict=True))
                self._noise = _LiveNoise(Calibrating(self.runs[0], [*live, *following(self._recorded)]))
            self._comparison = RunningComparison(two, self._rename, tolerance=self._tolerances, noise=self._noise)
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
    """The noise that replicas show, as they follow the baseline; what they say in general grows with each step."""

    def __init__(self, calibrating: Calibrating) -> None:
        self._calibrating = calibrating
        self._first = True

    def of_step(self, given: AlignedStep) -> StepNoise | None:
        """See `Noise`."""
        noise = self._calibrating.see(given.baseline, given.sides[0], first=self._first)
        if self._first:
            self._calibrating.refuse_what_does_not_align()
        self._first = False
        self.calibration = self._calibrating.calibration()
        return noise or None


def joined(comparisons: Sequence[Comparison]) -> Comparison:
    """One comparison of steps that were compared apart, one after the other."""
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
        differences=tuple(row for one in comparisons for row in one.differences),
        zooms=tuple(zoom for one in comparisons for zoom in one.zooms),
    )


_WORST_LAST = ("identical", "equivalent", "incomplete", "misaligned", "diverged")
"""Words of a verdict, the worst last."""
