"""Runs of recipes whose recordings go into one directory, and what each run took."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from traindiff.analyse.compare import RunCost
from traindiff.core.observation import Observation
from traindiff.errors import ConfigError, Problem, RecordingError
from traindiff.run.config.setup import PLAIN, Setup
from traindiff.run.processes.launch import launch
from traindiff.run.processes.rank_end import Patience, RankEnd, RanksError
from traindiff.run.processes.rank_process import seen_text
from traindiff.run.verify.failed import RunFailedError, of_ranks, of_this_process, refused
from traindiff.run.verify.recipe import Named, Recipe, undisturbed_random_state
from traindiff.run.verify.run_recipe import (
    check_on_rank,
    check_recipe,
    peak_bytes,
    record_on_rank,
    refuse_unlaunchable,
    run_recipe,
)
from traindiff.storage import open_recording

REPLICAS = ("ulp:1", "ulp:2", "reorder:1")
"""Default replicas from which noise floors are measured."""

OF_BATCHES = "channel:1"
"""One more of them if the model takes statistics of batches."""

LOGS = "logs"
"""Directory, beside the recordings, of the output of launched ranks."""

Progress = Callable[[str, int, int], None]
"""Called with the name of a run, its current step, and its number of steps."""


Launcher = Callable[..., list[RankEnd]]
"""Starts ranks and waits for them: `launch`, or `PresentRanks.launch` for ranks that exist already."""


@dataclass(slots=True, kw_only=True)
class Runs:
    """Runs recipes into one directory, and keeps account of the costs.

    A recipe that is given by name runs in fresh processes, one per rank of its setup. A function runs in this process
    if its setup is plain; otherwise it is sent to fresh processes, which must be able to import it.

    Attributes:
        directory: Holds the recordings, each under its name.
        seed: Seed of torch's, NumPy's and Python's generators.
        progress: Called as the runs proceed.
        record: Settings of `traindiff.record`; they override those of the recipes.
        asked_by: The call, for messages.
        patience: How long a run may go without ending a step.
        launcher: Starts the processes.
        controls: Determinism controls of the trainings; see `traindiff.run.verify.determinism`.
        label: Prefix of the name of each run in `progress` and `costs`.
        costs: What each run took, in order.
        peak_bytes: Largest resident memory of a run.
    """

    directory: Path
    seed: int
    progress: Progress | None = None
    record: Mapping[str, Any] = field(default_factory=dict)
    asked_by: str
    patience: Patience = field(default_factory=Patience)
    launcher: Launcher = launch
    controls: Sequence[str] = ()
    label: str = ""
    costs: list[RunCost] = field(default_factory=list)
    peak_bytes: int = 0

    def check(self, names: Iterable[str]) -> None:
        """Raise `ConfigError` if a run of these names would replace a recording that was made without a recipe."""
        problems = [
            Problem(
                where=os.fspath(self.directory / name),
                what="is a recording that no recipe made, and would be replaced.",
                fix="Give another directory for the runs (output, --output), or move the recording away.",
            )
            for name in names
            if _is_of_the_user(self.directory / name)
        ]
        if problems:
            raise ConfigError(self.asked_by, problems)

    def refuse_unusable(self, recipe: Named, setup: Setup) -> None:
        """Prepare a training once, before any run.

        Raises:
            ConfigError: The recipe cannot be used, or not under the setup.
        """
        if not isinstance(recipe, str):
            if is_launched(recipe, setup):
                refuse_unlaunchable(recipe, self.asked_by)
            with undisturbed_random_state():
                check_recipe(recipe, self.seed, setup, self.asked_by)
            return
        try:
            with tempfile.TemporaryDirectory(prefix="traindiff-check-") as outputs:
                launch(
                    check_on_rank, recipe, self.seed, setup, self.asked_by, world_size=1, grouped=False,
                    outputs=Path(outputs), patience=self.patience,
                )  # fmt: skip
        except RanksError as error:
            if error.first.problems:
                raise _config_error(error, self.asked_by) from error
            raise refused(RunFailedError(of_ranks("check", error)), self.asked_by) from error

    def run(
        self, recipe: Named, name: str, *, num_steps: int, setup: Setup = PLAIN, compiler_logs: bool = False,
        **settings: Any,
    ) -> str:  # fmt: skip
        """Run and record one training; a recording of that name is replaced.

        Args:
            recipe: Prepares the training.
            name: Name of the run, and of its recording.
            num_steps: Batches to train on.
            setup: Setup of the run.
            compiler_logs: Make torch's compiler log its decisions; this run always has its own processes.
            **settings: Further arguments of `run_recipe`.

        Returns:
            The path of the recording.

        Raises:
            ConfigError: The recipe or a setting cannot be used, or the existing recording is the user's own.
            RunFailedError: The training itself failed.
        """
        self.check([name])
        began = time.perf_counter()
        done = [0]

        def on_step(step: int) -> None:
            done[0] = step + 1
            if self.progress:
                self.progress(self.label + name, step + 1, num_steps)

        if self.progress:
            self.progress(self.label + name, 0, num_steps)
        path = os.fspath(self.directory / name)
        asked_by = self._asked_by(name)
        run = partial(
            run_recipe, path=path, num_steps=num_steps, seed=self.seed, setup=setup, asked_by=asked_by, overwrite=True,
            **{"controls": tuple(self.controls), **self.record, **settings},
        )  # fmt: skip
        try:
            if isinstance(recipe, str) or compiler_logs or is_launched(recipe, setup):
                self._launched((recipe, run, asked_by, compiler_logs), name, setup, on_step)
            else:
                _in_this_process(recipe, run, name, on_step, done)
                self.peak_bytes = max(self.peak_bytes, peak_bytes())
        finally:
            self.costs.append(RunCost(name=self.label + name, num_steps=done[0], seconds=time.perf_counter() - began))
        return path

    def _asked_by(self, name: str) -> str:
        return f"{self.asked_by}, run {name}"

    def _launched(self, args: Sequence[Any], name: str, setup: Setup, on_step: Callable[[int], None]) -> None:
        def on_first_ranks_step(rank: int, step: int) -> None:
            if rank == 0:
                on_step(step)

        try:
            ends = self.launcher(
                record_on_rank, *args, world_size=setup.nproc, grouped=setup.engine != "plain",
                outputs=self.directory / LOGS / name, patience=self.patience, on_step=on_first_ranks_step,
            )  # fmt: skip
        except RanksError as error:
            first = error.first
            if first.problems and not (first.explained and first.last_observation):  # the training had not begun
                raise _config_error(error, self._asked_by(name)) from error
            raise RunFailedError(of_ranks(name, error)) from error
        self.peak_bytes = max(self.peak_bytes, sum(end.result["peak_bytes"] for end in ends))


def is_launched(recipe: Named, setup: Setup) -> bool:
    """True if a run needs its own processes."""
    return isinstance(recipe, str) or setup.engine != "plain"


def _in_this_process(
    recipe: Recipe, run: Callable[..., str], name: str, on_step: Callable[[int], None], done: list[int]
) -> None:
    last = [""]

    def last_seen(seen: Observation) -> None:
        last[0] = seen_text(seen)

    try:
        run(recipe, on_step=on_step, last_seen=last_seen)
    except ConfigError as error:
        if error.__cause__ is None or not last[0]:  # the training had not begun
            raise
        failed = of_this_process(name, error, num_steps=done[0], last_observation=last[0])
        raise RunFailedError(failed, error) from error


def _config_error(error: RanksError, asked_by: str) -> ConfigError:
    """The `ConfigError` of the rank that explains the others."""
    return ConfigError(asked_by, error.first.problems)


def _is_of_the_user(path: Path) -> bool:
    try:
        return open_recording(os.fspath(path)).run.get("recipe") is None
    except RecordingError:
        return False  # nothing is there, or the rest of a killed run
