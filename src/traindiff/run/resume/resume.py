"""`traindiff.resume`: does a training that is saved and loaded go on as if it had never stopped?"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from traindiff.analyse.compare import compare
from traindiff.analyse.compare.resumed_state import State, compare_states, read_state
from traindiff.analyse.compare.resumption import Resumption
from traindiff.analyse.compare.verification import RunCost
from traindiff.errors import ConfigError, Problem
from traindiff.run.config.obstacles import obstacles
from traindiff.run.config.options import STEPS
from traindiff.run.config.setup import PLAIN, Setup
from traindiff.run.processes.launch import launch
from traindiff.run.processes.rank_end import Patience, RanksError
from traindiff.run.resume.stage import FRESH, Stage, leaves_path, stage_on_rank, state_path
from traindiff.run.verify.failed import RunFailedError, of_ranks, refused
from traindiff.run.verify.recipe import Named, recipe_name
from traindiff.run.verify.run_recipe import refuse_unlaunchable
from traindiff.run.verify.runs import LOGS, Progress

OUTPUT = "traindiff-resume"
"""Default directory of a resume."""

WHOLE, SAVED, RESUMED, END = "whole", "saved", "resumed", "end"
AFTER_SAVING = "after-saving"
CHECKPOINT = "checkpoint"


def resume(
    recipe: Named,
    output: str | os.PathLike[str] = OUTPUT,
    *,
    at: int,
    steps: int = STEPS,
    setup: Setup = PLAIN,
    resumed_ranks: int | None = None,
    seed: int = 0,
    record: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    progress: Progress | None = None,
) -> Resumption:
    """Train without a stop; train, save, load in fresh processes, and train on; and compare the two.

    Before the first step after loading, everything must be as it was saved, exactly: parameters, optimizer state and
    counts of steps, buffers, loss scaler, scheduler, random generators, and whatever else the training's functions
    use. Then each further step is compared with that of the training that never stopped.

    Args:
        recipe: Prepares the training; called in fresh processes, so a function must be importable by name there.
        output: Directory for recordings and checkpoint; those of an earlier call are replaced.
        at: Steps to train before saving.
        steps: Steps to train after loading.
        setup: Engine, dtype, ranks.
        resumed_ranks: Ranks that load and train on, if they are not as many as those that saved.
        seed: Seed of torch's, NumPy's and Python's generators.
        record: Settings of `traindiff.record` for all runs; they override those of the recipe.
        timeout: Seconds that a run may go without ending a step; see `traindiff.verify`.
        progress: Called as the runs proceed.

    Returns:
        What was not restored, and the comparison of the steps.

    Raises:
        ConfigError: The recipe, the setup or a setting cannot be used, or a run fails.
    """
    resumed_setup = setup if resumed_ranks is None else replace(setup, nproc=resumed_ranks)
    asked_by = "resume(...)"
    _check(recipe, at, steps, (setup, resumed_setup), asked_by)
    directory = Path(output)
    stages = stages_of(
        directory, at=at, steps=steps, setups=(setup, resumed_setup), seed=seed, record=record or {}, asked_by=asked_by
    )  # fmt: skip
    make_empty(directory, asked_by)
    runs = _Runs(recipe=recipe, directory=directory, timeout=timeout, progress=progress, asked_by=asked_by)
    for stage in stages:
        runs.run(stage)
    return result_of(recipe_name(recipe), stages, tuple(runs.costs))


Stages = tuple[Stage, Stage, Stage]
"""The training that never stops; the one that is saved; and the one that is loaded."""


def stages_of(
    directory: Path, *, at: int, steps: int, setups: tuple[Setup, Setup], seed: int, record: Mapping[str, Any],
    asked_by: str,
) -> Stages:  # fmt: skip
    """The parts of a resume, in the order in which they are run."""
    before, after = setups
    checkpoint = directory / CHECKPOINT
    common: dict[str, Any] = {"output": directory, "seed": seed, "record": record, "asked_by": asked_by}
    return (
        Stage(name=WHOLE, end_step=at + steps, states={at: WHOLE, at + steps: END}, setup=before, **common),
        Stage(
            name=SAVED, end_step=at, states={at: SAVED}, checkpoint=checkpoint, saved=AFTER_SAVING, setup=before,
            **common,
        ),
        Stage(
            name=RESUMED, first_step=at, end_step=at + steps, states={at: RESUMED}, checkpoint=checkpoint, loads=True,
            setup=after, **common,
        ),
    )  # fmt: skip


def result_of(recipe: str, stages: Stages, costs: tuple[RunCost, ...] = ()) -> Resumption:
    """Judge a resume whose parts have been run.

    Args:
        recipe: Its name.
        stages: The parts.
        costs: What they took.
    """
    whole, _, resumed = stages
    directory, at = whole.output, resumed.first_step
    names = (WHOLE, SAVED, AFTER_SAVING, FRESH, RESUMED, END)
    states = {name: _state(directory, name, (resumed if name in (FRESH, RESUMED) else whole).setup) for name in names}
    comparison = compare(directory / WHOLE, directory / RESUMED, steps=f"{at}-", offset=0)
    told = compare_states(
        states, at=at, steps_agree=not comparison.findings, same_bits_after=comparison.verdict == "identical"
    )  # fmt: skip
    return Resumption(
        recipe=recipe, setups=(whole.setup.message, resumed.setup.message), at=at, differences=told.differences,
        notes=told.notes, comparison=comparison, runs=costs,
    )  # fmt: skip


def _state(directory: Path, name: str, setup: Setup) -> State:
    files = [leaves_path(directory, name, rank) for rank in range(setup.nproc)]
    return read_state(state_path(directory, name), files)


def _check(recipe: Named, at: int, steps: int, setups: tuple[Setup, Setup], asked_by: str) -> None:
    problems = [
        Problem(where=f"{name}={value}", what="must be a whole number, at least 1.", fix=f"Write {name}={good}.")
        for name, value, good in (("at", at, 3), ("steps", steps, STEPS))
        if isinstance(value, bool) or not isinstance(value, int) or value < 1
    ]
    for setup in setups:
        problems += [one for one in obstacles(setup) if one not in problems]
    if problems:
        raise ConfigError(asked_by, problems)
    if not isinstance(recipe, str):
        refuse_unlaunchable(recipe, asked_by)


def make_empty(directory: Path, asked_by: str) -> None:
    """Make the directories; a checkpoint of an earlier call is replaced.

    Raises:
        ConfigError: There is a checkpoint that no earlier call has written.
    """
    checkpoint = directory / CHECKPOINT
    if checkpoint.exists() and not (directory / "states").is_dir():
        problem = Problem(
            where=str(checkpoint), what="was not written by an earlier call of resume, and would be replaced.",
            fix="Give another directory (output, --output), or move it away.",
        )  # fmt: skip
        raise ConfigError(asked_by, [problem])
    shutil.rmtree(checkpoint, ignore_errors=True)
    (directory / "states").mkdir(parents=True, exist_ok=True)
    checkpoint.mkdir()


class _Runs:
    """Runs the parts, each in fresh processes, and keeps account of what they took."""

    def __init__(
        self, *, recipe: Named, directory: Path, timeout: float | None, progress: Progress | None, asked_by: str
    ) -> None:
        self._recipe = recipe
        self._directory = directory
        self._patience = Patience(seconds=timeout)
        self._progress: Callable[[str, int, int], None] = progress or (lambda *_: None)
        self._asked_by = asked_by
        self.costs: list[RunCost] = []

    def run(self, stage: Stage) -> None:
        """Run one part on all its ranks.

        Raises:
            ConfigError: The recipe cannot be used, or the training failed.
        """
        count = stage.end_step - stage.first_step
        self._progress(stage.name, 0, count)
        began = time.perf_counter()

        def on_step(rank: int, step: int) -> None:
            if rank == 0:
                self._progress(stage.name, step + 1 - stage.first_step, count)

        try:
            launch(
                stage_on_rank, self._recipe, stage, world_size=stage.setup.nproc,
                grouped=stage.setup.engine != "plain", outputs=self._directory / LOGS / stage.name,
                patience=self._patience, on_step=on_step,
            )  # fmt: skip
        except RanksError as error:
            if error.first.problems:
                raise ConfigError(f"{self._asked_by}, run {stage.name}", error.first.problems) from error
            raise refused(RunFailedError(of_ranks(stage.name, error)), self._asked_by) from error
        self.costs.append(RunCost(name=stage.name, num_steps=count, seconds=time.perf_counter() - began))
