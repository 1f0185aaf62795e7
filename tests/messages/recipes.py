"""What `verify`, `calibrate`, `doctor` and the demo say of recipes and settings that they cannot use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import traindiff
from tests.messages.provoking import Chapter
from tests.run.verify.recipes import mlp, one_thread, other_gelu
from tests.storage.samples import write
from traindiff.analyse.compare.verification import FailedRank, FailedRun
from traindiff.run.config.setup import Setup
from traindiff.run.demo.model import read_text
from traindiff.run.demo.training import train
from traindiff.run.doctor.checks import Plan, run_checks
from traindiff.run.doctor.training import check_backend, try_out
from traindiff.run.processes.present_ranks import PresentRanks
from traindiff.run.verify.failed import RunFailedError, refused
from traindiff.run.verify.matrix import read_grid
from traindiff.run.verify.recipe import load_recipe

chapter = Chapter("Recipes: verify, calibrate, doctor, demo", [])
situation = chapter.situation


def calibrated(here: Path, recipe: Any, **settings: Any) -> None:
    """Run the baseline and nothing else."""
    with one_thread():
        traindiff.calibrate(recipe, here / "runs", **{"steps": 2, "replicas": (), "repeat": False, **settings})


def training(**changes: Any) -> traindiff.Training:
    """The usual training, or parts of another one."""
    whole = mlp()()
    assert isinstance(whole, traindiff.Training)
    parts = {name: getattr(whole, name) for name in ("model", "optimizer", "batches", "step", "record")}
    return traindiff.Training(**{**parts, **changes})


@situation("verify with settings that cannot be")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    wrong: Any = {"steps": 0, "replicas": ("ulp:x", "noise"), "pin": "allways", "timeout": 0}
    traindiff.verify(mlp(), mlp(), here / "runs", **wrong)


@situation("verify of two trainings that are the same in spite of settings")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    both, short = mlp(), Setup(dtype="float16")
    traindiff.verify(both, both, here / "runs", setup=short, baseline_setup=short, rtol=0.05, atol=0.2)


@situation("verify where recordings of the user's own are")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    write(here / "runs" / "baseline")
    traindiff.verify(mlp(), mlp(), here / "runs")


@situation("verify where files of the user's own are")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    (here / "runs").mkdir()
    (here / "runs" / "report.txt").write_text("of last week")
    traindiff.verify(mlp(), mlp(), here / "runs")


@situation("verify of a function that other processes cannot import")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    traindiff.verify(mlp(), output=here / "runs", setup=traindiff.Setup(engine="ddp", nproc=2))


@situation("verify whose baseline is killed")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    message = "Rank 0 was ended by signal 9, SIGKILL (was there enough memory?)."
    killed = FailedRank(
        rank=0,
        how="died",
        message=message,
        num_steps=2,
        last_observation="step 2, micro-step 0, forward, layers.3 output[0]",
    )
    raise refused(RunFailedError(FailedRun(run="baseline", first=0, ranks=(killed,))), "verify(...)")


@situation("investigate with fewer than no seeds")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    traindiff.investigate(mlp(), mlp(), here / "runs", seeds=-1)


@situation("verify on another number of ranks than a launcher has started")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    ranks = object.__new__(PresentRanks)
    ranks.world_size = 2
    ranks.refuse_other_sizes(3, "verify(...)")


@situation("a grid that varies nothing")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    (here / "grid.toml").write_text('exclude = "ddp"\n')
    read_grid(here / "grid.toml", {})


@situation("a grid that does not exist")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    read_grid(here / "grid.toml", {})


@situation("a grid that is no TOML")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    (here / "grid.toml").write_text("engine = [")
    read_grid(here / "grid.toml", {})


@situation("a grid with all that can be wrong with it")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    text = '[grid]\nengin = ["ddp"]\nnproc = 2\n[settings]\nnproc = 4\n[setings]\n[[exclude]]\ndtpe = "float32"\n'
    (here / "grid.toml").write_text(text)
    read_grid(here / "grid.toml", {})


@situation("a recipe that returns nothing")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    def recipe() -> None:
        mlp()()

    calibrated(here, recipe)


@situation("a recipe that returns model and optimizer")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    def recipe() -> Any:
        found = training()
        return found.model, found.optimizer

    calibrated(here, recipe)


@situation("a recipe that returns four other things")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    def recipe() -> Any:
        return "model", 3, None, 1

    calibrated(here, recipe)


@situation("a recipe that raises")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    def recipe() -> Any:
        raise FileNotFoundError("no such file: data.bin")

    calibrated(here, recipe)


@situation("a recipe with a setting of traindiff.record that there is not")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    def recipe() -> Any:
        return training(record={"batch_axes": 1})

    calibrated(here, recipe)


@situation("a recipe without batches")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    def recipe() -> Any:
        return training(batches=[])

    calibrated(here, recipe)


@situation("a recipe whose batches fail")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    def batches() -> Iterator[Tensor]:
        yield torch.randn(16, 6)
        raise ConnectionError("connection lost")

    def recipe() -> Any:
        return training(batches=batches())

    calibrated(here, recipe)


@situation("a recipe whose step fails")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    def step(batch: Tensor) -> None:
        raise KeyError("labels")

    def recipe() -> Any:
        return training(step=step)

    calibrated(here, recipe)


@situation("a recipe that is another training each time")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    seeds = iter(range(9))

    def recipe() -> Any:
        torch.manual_seed(next(seeds))
        return mlp()()

    calibrated(here, recipe, repeat=True)


@situation("verify with a candidate that cannot be forced")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    def recipe() -> Any:
        found = training()
        other_gelu(found.model)  # type: ignore[arg-type]
        found.model.compile(backend="eager")
        return found

    with one_thread():
        found = traindiff.verify(mlp(), recipe, here / "runs", steps=1, replicas=(), repeat=False)
    return f"In the report:\n    {found.pin_note}"


RECIPES = """
from torch import nn
from torch.optim import SGD

def recipe():
    model = nn.Linear(2, 1)
    return model, SGD(model.parameters(), lr=0.1), [], print
"""


def loaded(here: Path, named: str) -> None:
    """Have the recipe looked up that the command line names."""
    (here / "train.py").write_text(RECIPES)
    (here / "broken.py").write_text("import torhc\n")
    (here / "notes.md").touch()
    load_recipe(named, asked_by="verify")


@situation("a recipe without a function")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    loaded(here, "train.py")


@situation("a recipe in a file that does not exist")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    loaded(here, "trian.py:recipe")


@situation("a recipe in a file of something else")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    loaded(here, "notes.md:recipe")


@situation("a recipe in a module that does not exist")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    loaded(here, "trainings.mlp:recipe")


@situation("a function that the file does not have")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    loaded(here, "train.py:recip")


@situation("a file that cannot be run")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    loaded(here, "broken.py:recipe")


@situation("doctor: a recipe that gives the same model each time")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    found = training()

    def recipe() -> Any:
        return found

    try_out(recipe)


@situation("doctor: a step that does not train")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    def recipe() -> Any:
        return training(step=lambda batch: None)

    try_out(recipe)


@situation("doctor: a backend that there is not")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    patched.setattr("torch.compiler.list_backends", lambda exclude_tags: ["aot_eager", "eager", "inductor"])
    check_backend("inducter")


@situation("doctor: a training whose first step is skipped")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    def recipe() -> traindiff.Training:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(number: int) -> None:
            if number:
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()

        return traindiff.Training(model=model, optimizer=optimizer, batches=range(9), step=step)

    with one_thread():
        checks = run_checks(Plan(recipe=recipe, steps=1, rounds=0, backend=None))
        return "\n".join(
            f"    {one.result}: {one.name}: {one.message}" for one in checks if one.name.startswith("every")
        )


@situation("the demo: a fault that there is not")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    train(None, fault="lost-gradeint")


@situation("the demo: too few micro-batches for the fault")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    train(None, fault="lost-gradient")


@situation("the demo: micro-batches that are not equally large")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    train(None, micro_batches=3)


@situation("the demo: a Python without sources")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    read_text(here)
