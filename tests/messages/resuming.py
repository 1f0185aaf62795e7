"""What `traindiff.resume`, and recordings of resumed trainings, say of what they cannot use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from typer.testing import CliRunner

import traindiff
from tests.messages.provoking import Chapter
from tests.run.resume.recipes import training
from tests.run.verify.recipes import one_thread
from traindiff.cli.commands import app
from traindiff.run.config.setup import PLAIN
from traindiff.run.resume.resume import Stages, make_empty, stages_of
from traindiff.run.resume.stage import run_stage

chapter = Chapter("Resumes", [])
situation = chapter.situation


def changed(**parts: Any) -> Callable[[], traindiff.Training]:
    """A recipe of the usual training with other parts."""

    def recipe() -> traindiff.Training:
        whole = training()
        own = {name: getattr(whole, name) for name in ("model", "optimizer", "batches", "step", "save", "load")}
        return traindiff.Training(**{**own, **parts})

    return recipe


def stages(here: Path) -> Stages:
    """The parts of a resume after one step."""
    make_empty(here / "runs", "resume(...)")
    return stages_of(
        here / "runs", at=1, steps=1, setups=(PLAIN, PLAIN), seed=0, record={}, asked_by="resume(...)"
    )  # fmt: skip


@situation("a first step that is no number of a step")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    traindiff.record(here / "run", nn.Linear(2, 2), first_step=-1)


@situation("a resume with numbers of steps that cannot be")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    traindiff.resume("train.py:recipe", here, at=0, steps=0)


@situation("a resume where a checkpoint of the user's own is")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    (here / "checkpoint").mkdir()
    traindiff.resume("train.py:recipe", here, at=1)


@situation("a training that gives save and not load")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    with one_thread():
        run_stage(changed(load=None), stages(here)[0])


@situation("a training whose load returns no batches")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    with one_thread():
        parts = stages(here)
        run_stage(changed(), parts[1])
        run_stage(changed(load=lambda _: 1.5), parts[2])


@situation("a training with too few batches after loading")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    with one_thread():
        parts = stages(here)
        run_stage(changed(), parts[1])
        run_stage(changed(load=lambda _: []), parts[2])


@situation("a resume on ranks that are no numbers")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    command = ["resume", "train.py:recipe", "--at", "1", "--ranks", "two"]
    return CliRunner().invoke(app, command, env={"COLUMNS": "200", "TERM": "dumb"}).stderr
