"""All that is asked of a verification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traindiff.launching.launch import launch
from traindiff.launching.patience import Patience
from traindiff.launching.present_ranks import PresentRanks
from traindiff.recipes.questioned import Question
from traindiff.recipes.recorded_run import Named
from traindiff.recipes.runs import Progress, Runs
from traindiff.setups.setup import Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """All that is asked of a verification; see `traindiff.verify`.

    Attributes:
        recipe: Prepares the trusted training.
        baseline_setup: How it is run.
        question: What is asked of the candidate.
        output: Directory of the recordings.
        seed: Of torch's, NumPy's and Python's generators.
        repeat: Also run the baseline again as it is.
        record: Settings of `traindiff.record`.
        timeout: Seconds that a run may go without ending a step.
        progress: Called as the runs proceed.
        asked_by: The call, for messages.
    """

    recipe: Named
    baseline_setup: Setup
    question: Question
    output: Path
    seed: int = 0
    repeat: bool = True
    record: Mapping[str, Any] = field(default_factory=dict)
    timeout: float | None = None
    progress: Progress | None = None
    asked_by: str = "verify(...)"

    def runs(self, directory: Path, ranks: PresentRanks | None) -> Runs:
        """Runs that go into a directory.

        Args:
            directory: Where.
            ranks: Those that are there already; None where processes are to be started.
        """
        return Runs(
            directory=directory, seed=self.seed, progress=self.progress, record=self.record, asked_by=self.asked_by,
            patience=Patience(seconds=self.timeout), launcher=ranks.launch if ranks else launch,
        )  # fmt: skip
