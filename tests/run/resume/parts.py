"""The parts of a resume in this process: what trains on, what saves, and what loads."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import traindiff
from traindiff.analyse.compare.resumption import Resumption
from traindiff.run.config.setup import PLAIN
from traindiff.run.resume.resume import Stages, make_empty, result_of, stages_of
from traindiff.run.resume.stage import run_stage

AT, STEPS = 3, 3


Make = Callable[[], traindiff.Training]


def stages(directory: Path) -> Stages:
    return stages_of(directory, at=AT, steps=STEPS, setups=(PLAIN, PLAIN), seed=0, record={}, asked_by="resume(...)")


def begun(recipe: Make, directory: Path) -> Path:
    """A directory in which the training that never stops was run, and the one that saves."""
    make_empty(directory, "resume(...)")
    whole, saved, _ = stages(directory)
    run_stage(recipe, whole)
    run_stage(recipe, saved)
    return directory


def resumed(recipe: Make, saved: Path, here: Path) -> Resumption:
    """Load with this recipe, train on, and judge."""
    directory = here / "runs"
    shutil.copytree(saved, directory)
    parts = stages(directory)
    run_stage(recipe, parts[2])
    return result_of("recipe", parts)


def says(found: Resumption) -> list[str]:
    return [one.message for one in found.differences]
