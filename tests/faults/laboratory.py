"""Baselines with their replicas, recorded once each, to hold many candidates against."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

import traindiff
from tests.faults.recipe import Recipe
from traindiff.analyse.compare import Comparison
from traindiff.run.verify.pinning import NATIVE, ForcedStep, ForcedSteps, pin_down
from traindiff.run.verify.request import VerifyRequest
from traindiff.run.verify.runs import REPLICAS, Runs

STEPS = 5


@dataclass(slots=True)
class Laboratory:
    """Holds candidates against calibrated baselines, free and forced.

    Attributes:
        directory: For the recordings.
        baselines: What was run of each baseline so far.
    """

    directory: Path
    baselines: dict[Recipe, Baseline] = field(default_factory=dict)

    def free(self, baseline: Recipe, candidate: Recipe) -> Comparison:
        """Both run freely; floors from three replicas."""
        known = self._known(baseline)
        recordings = known.recordings()
        found = _run(known.runs, candidate)
        return traindiff.compare(recordings[0], found, noise=recordings[1:])

    def forced(
        self, baseline: Recipe, candidate: Recipe, *, step: int, precision: torch.dtype | None = None
    ) -> Comparison:
        """One step, every tensor of the candidate forced to the baseline's once it was observed."""
        known = self._known(baseline)
        given = known.forced_step(step, precision)
        request = VerifyRequest(recipe=baseline, candidate=candidate, output=self.directory)
        try:
            return pin_down(known.runs, given, request).comparison
        finally:
            torch.set_num_threads(1)

    def given(self, baseline: Recipe, *, step: int, precision: torch.dtype | None = None) -> ForcedStep:
        """What candidates are forced to."""
        return self._known(baseline).forced_step(step, precision)

    def _known(self, recipe: Recipe) -> Baseline:
        if recipe not in self.baselines:
            runs = Runs(directory=self.directory / str(len(self.baselines)), seed=0, asked_by="laboratory")
            self.baselines[recipe] = Baseline(recipe=recipe, runs=runs)
        return self.baselines[recipe]


@dataclass(slots=True, kw_only=True)
class Baseline:
    """What was run of one baseline."""

    recipe: Recipe
    runs: Runs
    free: list[str] = field(default_factory=list)
    steps: ForcedSteps | None = None

    def recordings(self) -> list[str]:
        """The baseline's recording, then those of its replicas."""
        if not self.free:
            names = {"baseline": None, **{one.replace(":", "-"): one for one in REPLICAS}}
            self.free = [
                self.runs.run(self.recipe, name, num_steps=STEPS, replica=replica) for name, replica in names.items()
            ]
        return self.free

    def forced_step(self, step: int, precision: torch.dtype | None) -> ForcedStep:
        """See `traindiff.run.verify.pinning`."""
        if self.steps is None:
            self.steps = ForcedSteps(self.runs, self.recipe)
        return self.steps.step(step, NATIVE if precision is None else str(precision).removeprefix("torch."))


def _run(runs: Runs, candidate: Recipe) -> str:
    try:
        return runs.run(candidate, "candidate", num_steps=STEPS)
    finally:
        torch.set_num_threads(1)  # some variations vary just that
