"""Recipes: what they may return, how they are found, and what is said of those that cannot be used."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

import traindiff
from tests.run.verify.recipes import mlp
from traindiff.errors import ConfigError
from traindiff.run.config.training import logged
from traindiff.run.demo import recipes
from traindiff.run.verify.recipe import load_recipe, prepared, undisturbed_random_state
from traindiff.run.verify.run_recipe import run_recipe


@pytest.fixture(autouse=True)
def imports_undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Scripts are put on the path and imported; the next test must not see them."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and "pytest-" in str(sys.modules[name].__file__):
            del sys.modules[name]


def run(recipe: Any, path: Path, **options: Any) -> str:
    return run_recipe(recipe, path, **{"num_steps": 2, "seed": 0, "asked_by": "test", **options})


# What a recipe returns.


def test_a_recipe_is_seeded_before_it_is_called() -> None:
    drawn = []

    def recipe() -> traindiff.Training:
        drawn.append((torch.rand(1).item(), np.random.rand(), random.random()))
        return mlp()()  # type: ignore[return-value]

    for seed in (0, 0, 1):
        prepared(recipe, seed=seed, asked_by="test")

    assert drawn[0] == drawn[1]
    assert all(first != other for first, other in zip(drawn[0], drawn[2], strict=True))


def test_a_tuple_of_model_optimizer_batches_and_step_is_a_training() -> None:
    model = nn.Linear(2, 2)
    optimizer, batches, step = SGD(model.parameters()), [1, 2], print

    found = prepared(lambda: (model, optimizer, batches, step), seed=0, asked_by="test")

    assert (found.model, found.optimizer, found.batches, found.step) == (model, optimizer, batches, step)
    assert found.record == {}


@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_the_demos_recipes_are_trainings(name: str) -> None:
    found = prepared(getattr(recipes, name), seed=0, asked_by="test")

    assert isinstance(found, traindiff.Training)
    assert isinstance(found.model, nn.Module)


@pytest.mark.parametrize("optimizer", [None, "one", "list", "mapping"])
def test_optimizers_may_be_given_as_to_record(optimizer: str | None) -> None:
    model = nn.Linear(2, 2)
    one = SGD(model.parameters())
    given = {None: None, "one": one, "list": [one], "mapping": {"sgd": one}}[optimizer]

    assert prepared(lambda: (model, given, [], print), seed=0, asked_by="test").optimizer is given


def test_everything_wrong_with_a_training_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        prepared(lambda: ("model", 3, None, 1), seed=0, asked_by="test")  # type: ignore[arg-type, return-value]

    assert len(caught.value.problems) == 4
    message = str(caught.value)
    assert "model\n    is a str, not a torch.nn.Module." in message
    assert "optimizer\n    is an int, not a torch.optim.Optimizer." in message
    assert "batches\n    is None, not something to iterate over." in message
    assert "step\n    is an int, not a function." in message


@pytest.mark.parametrize(("returned", "message"), [(None, "None."), ((1, 2), "a tuple of 2."), (7, "an int.")])
def test_what_is_no_training_is_refused_with_what_to_return(returned: object, message: str) -> None:
    with pytest.raises(ConfigError, match=f"returned {message}") as caught:
        prepared(lambda: returned, seed=0, asked_by="test")  # type: ignore[arg-type, return-value]

    assert "Return traindiff.Training(model=..., optimizer=..., batches=..., step=...)" in str(caught.value)


def test_a_recipe_that_raises_is_refused_with_its_error_as_the_cause() -> None:
    def recipe() -> traindiff.Training:
        raise FileNotFoundError("no data here")

    with pytest.raises(ConfigError, match="calling it raised FileNotFoundError: no data here") as caught:
        prepared(recipe, seed=0, asked_by="test")

    assert isinstance(caught.value.__cause__, FileNotFoundError)


# Running one.


def test_a_run_is_recorded_with_what_its_step_returns(tmp_path: Path) -> None:
    recording = traindiff.open_recording(run(mlp(), tmp_path / "run"))

    steps = list(recording.steps(0))
    logged = {seen.path for seen in steps[1].observations if seen.phase == "loss" and seen.slot == "logged"}
    assert len(steps) == 2
    assert logged == {"loss", "grad_norm"}


def test_two_runs_of_a_recipe_hold_the_same_bits_and_leave_random_numbers_alone(tmp_path: Path) -> None:
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]

    paths = [run(mlp(), tmp_path / name) for name in ("one", "other")]

    assert traindiff.compare(*paths).verdict == "identical"
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]  # type: ignore[index]
    assert random.getstate() == states[2]


def test_random_numbers_are_given_back_when_a_run_fails() -> None:
    state = torch.get_rng_state()

    def fail() -> None:
        torch.manual_seed(3)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), undisturbed_random_state():
        fail()

    assert torch.equal(torch.get_rng_state(), state)


def test_settings_of_a_training_reach_its_recording(tmp_path: Path) -> None:
    def recipe() -> traindiff.Training:
        training = mlp()()
        assert isinstance(training, traindiff.Training)
        return traindiff.Training(
            model=training.model, optimizer=training.optimizer, batches=training.batches, step=training.step,
            record={"select": "0*", "observe": "forward"},
        )  # fmt: skip

    settings = traindiff.open_recording(run(recipe, tmp_path / "run", observe="grad")).run["settings"]

    assert (settings["select"], settings["observe"]) == (["0*"], ["grad"])


def test_fewer_batches_than_steps_end_the_run(tmp_path: Path) -> None:
    path = run(mlp(), tmp_path / "run", num_steps=99)

    assert sum(1 for _ in traindiff.open_recording(path).steps(0)) == 20


def failing_batches() -> Iterator[torch.Tensor]:
    yield torch.randn(4, 6)
    raise OSError("connection lost")


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "batches\n    are none.\n    Give at least one batch."),
        ([torch.randn(4, 6), torch.randn(4, 5)], "step\n    calling it with batch 1 raised RuntimeError: mat1 and"),
        (failing_batches(), "batches\n    asking for batch 1 raised OSError: connection lost"),
    ],
    ids=["none", "wrong shape", "failing"],
)
def test_a_training_that_fails_says_where(batches: Any, message: str, tmp_path: Path) -> None:
    def recipe() -> traindiff.Training:
        training = mlp()()
        assert isinstance(training, traindiff.Training)
        return traindiff.Training(
            model=training.model, optimizer=training.optimizer, batches=batches, step=training.step
        )

    with pytest.raises(ConfigError) as caught:
        run(recipe, tmp_path / "run")

    assert message in str(caught.value)


def test_losses_and_numbers_by_name_are_logged_and_nothing_else() -> None:
    assert [name for name, _ in logged(torch.tensor([0.5]))] == ["loss"]
    assert dict(logged({"loss": 1.0, "steps": 3, "logits": torch.ones(2), "name": "x"})) == {"loss": 1.0, "steps": 3}
    assert list(logged(None)) == []


# Finding one.

SCRIPT = """
from model import WIDTH
from torch import nn
from torch.optim import SGD

def recipe():
    model = nn.Linear(WIDTH, 1)
    return model, SGD(model.parameters(), lr=0.1), [], print
"""


def script(directory: Path, *, width: int) -> str:
    directory.mkdir()
    (directory / "train.py").write_text(SCRIPT)
    (directory / "model.py").write_text(f"WIDTH = {width}\n")
    return f"{directory / 'train.py'}:recipe"


def width(recipe: Any) -> int:
    return int(prepared(recipe, seed=0, asked_by="test").model.in_features)  # type: ignore[arg-type]


def test_a_script_may_import_its_neighbors(tmp_path: Path) -> None:
    assert width(load_recipe(script(tmp_path / "here", width=3), asked_by="test")) == 3


def test_two_scripts_of_one_name_get_each_its_own_neighbors(tmp_path: Path) -> None:
    before, after = script(tmp_path / "before", width=3), script(tmp_path / "after", width=5)

    found = [load_recipe(named, asked_by="test") for named in (before, after)]

    assert [width(one) for one in found] == [3, 5]


def test_a_script_beside_a_folder_with_the_name_of_an_installed_package_leaves_that_alone(tmp_path: Path) -> None:
    named = script(tmp_path / "here", width=3)
    for name in ("numpy", "traindiff", "json"):
        (tmp_path / "here" / name).mkdir()
        (tmp_path / "here" / name / "__init__.py").touch()

    load_recipe(named, asked_by="test")

    assert sys.modules["numpy"] is np
    assert sys.modules["traindiff"] is traindiff


def test_a_module_of_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "here", width=4)
    monkeypatch.chdir(tmp_path / "here")

    assert width(load_recipe("train:recipe", asked_by="test")) == 4


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("train.py", "does not name a function in a file or module."),
        (":recipe", "does not name a function in a file or module."),
        ("train.py:", "does not name a function in a file or module."),
        ("missing.py:recipe", "missing.py does not exist."),
        ("here:recipe", "here is not a Python file."),
        ("here/train.py:recpie", 'Did you mean "recipe"?'),
        ("no_such_module:recipe", "there is no module no_such_module to import."),
        ("broken.py:recipe", "running broken.py raised SyntaxError"),
        ("exits.py:recipe", "running exits.py raised SystemExit: no arguments"),
    ],
)
def test_a_recipe_that_cannot_be_found_is_refused_with_what_to_write(
    named: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path / "here", width=3)
    (tmp_path / "broken.py").write_text("def recipe(:")
    (tmp_path / "exits.py").write_text("raise SystemExit('no arguments')")
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigError) as caught:
        load_recipe(named, asked_by="verify")

    assert str(caught.value).startswith("1 problem in verify; nothing was done.")
    assert message in str(caught.value)


def test_a_script_that_reads_its_command_line_finds_no_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(
        "import argparse, sys\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--lr', type=float, default=0.5)\n"
        "options = parser.parse_args()\n"
        "def recipe():\n"
        "    return sys.argv, parser.parse_args().lr, options.lr\n"
    )
    monkeypatch.setattr(sys, "argv", ["traindiff", "investigate", "train.py:recipe"])
    source = str(tmp_path / "train.py")

    recipe: Any = load_recipe(f"{source}:recipe", asked_by="test")

    assert recipe() == ([source], 0.5, 0.5)
    assert sys.argv == ["traindiff", "investigate", "train.py:recipe"]
