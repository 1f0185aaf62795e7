"""All that is asked of a verification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from traindiff.run.config.setup import Setup, baseline_setup
from traindiff.run.processes.launch import launch
from traindiff.run.processes.present_ranks import PresentRanks
from traindiff.run.processes.rank_end import Patience
from traindiff.run.verify.run_recipe import Named
from traindiff.run.verify.runs import Progress, Runs
from traindiff.run.verify.trusted import Question


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedSetup:
    """What was asked for, options that were left out as None.

    Attributes:
        engine: See `Setup`.
        baseline_engine: Of the trusted training.
        nproc: See `Setup`.
        zero_stage: See `Setup`.
        offload_device: See `Setup`.
        further: Further settings of a `Setup`.
    """

    engine: str | None = None
    baseline_engine: str = "plain"
    nproc: int | None = None
    zero_stage: int | None = None
    offload_device: str | None = None
    further: dict[str, Any] = field(default_factory=dict)


def candidate_setup(asked: AskedSetup, *, world_size: int | None) -> Setup:
    """The setup of the candidate: what was left out follows from the rest.

    Args:
        asked: What was asked for.
        world_size: Number of ranks that are there already; None where none are.
    """
    of_deepspeed = asked.zero_stage is not None or asked.offload_device is not None or asked.further.get("deepcompile")
    engine: Any = asked.engine or ("deepspeed" if of_deepspeed else "plain")
    usual = 1 if engine == "plain" else world_size or 2
    offload: Any = asked.offload_device or "none"
    return Setup(
        engine=engine, nproc=asked.nproc or usual, zero_stage=asked.zero_stage or 0, offload_device=offload,
        **asked.further,
    )  # fmt: skip


def trusted_setup(asked: AskedSetup, candidate: Setup) -> Setup:
    """The setup of the baseline: plain, or under the engine that was asked for, on as many ranks."""
    if asked.baseline_engine == "plain":
        return baseline_setup(candidate)
    engine: Any = asked.baseline_engine
    plain = Setup(engine=engine, nproc=candidate.nproc if candidate.nproc > 1 else asked.nproc or 2)
    return replace(
        plain, dtype=candidate.dtype, gradient_accumulation_steps=candidate.gradient_accumulation_steps,
        gradient_clipping=candidate.gradient_clipping, loss_scale=candidate.loss_scale,
    )  # fmt: skip


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
