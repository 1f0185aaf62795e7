"""Runs of recipes that go into one directory, with what each took."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traindiff.comparison import RunCost
from traindiff.errors import ConfigError, Problem, RecordingError
from traindiff.recipes.recipe import Recipe
from traindiff.recipes.run_recipe import run_recipe
from traindiff.recording import open_recording

REPLICAS = ("ulp:1", "ulp:2", "reorder:1")
"""Replicas that floors are measured from by default."""

Progress = Callable[[str, int, int], None]
"""Called with the name of a run, its current step, and how many there will be."""


@dataclass(slots=True, kw_only=True)
class Runs:
    """Runs recipes into one directory, and keeps account of it.

    Attributes:
        directory: Holds the recordings, each under its name.
        seed: Of torch's, NumPy's and Python's generators.
        progress: Called as the runs proceed.
        record: Settings of `traindiff.record`, over those of the recipes.
        asked_by: The call, for messages.
        costs: What each run took, in order.
    """

    directory: Path
    seed: int
    progress: Progress | None = None
    record: Mapping[str, Any] = field(default_factory=dict)
    asked_by: str
    costs: list[RunCost] = field(default_factory=list)

    def check(self, names: Iterable[str]) -> None:
        """Raise if a run of one of these names would replace a recording that no recipe made: it is the user's own.

        Raises:
            ConfigError: Names all of them.
        """
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

    def run(self, recipe: Recipe, name: str, *, num_steps: int, **settings: Any) -> str:
        """Run and record one; a recording of that name is replaced. Returns its path."""
        began = time.perf_counter()
        done = [0]

        def on_step(step: int) -> None:
            done[0] = step + 1
            if self.progress:
                self.progress(name, step + 1, num_steps)

        if self.progress:
            self.progress(name, 0, num_steps)
        path = run_recipe(
            recipe, self.directory / name, num_steps=num_steps, seed=self.seed, on_step=on_step,
            asked_by=f"{self.asked_by}, run {name}", overwrite=True, **{**self.record, **settings},
        )  # fmt: skip
        self.costs.append(RunCost(name=name, num_steps=done[0], seconds=time.perf_counter() - began))
        return path


def _is_of_the_user(path: Path) -> bool:
    try:
        return open_recording(os.fspath(path)).run.get("recipe") is None
    except RecordingError:
        return False  # nothing is there, or what a run that was killed left
