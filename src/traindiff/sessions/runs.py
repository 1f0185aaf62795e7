"""Runs of recipes that go into one directory, with what each took."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from traindiff.comparison import RunCost
from traindiff.sessions.recipe import Recipe
from traindiff.sessions.running import run_recipe

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
        self.costs.append(RunCost(name=name, steps=done[0], seconds=time.perf_counter() - began))
        return path
