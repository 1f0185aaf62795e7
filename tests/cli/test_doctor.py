"""`traindiff doctor`: what it checks, what it finds, and what it says of recipes that cannot be used."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from typer.testing import CliRunner, Result

from traindiff.cli.commands import app
from traindiff.run.doctor.checks import Plan, run_checks
from traindiff.run.doctor.timing import interleaved
from traindiff.run.doctor.training import first_difference, try_out
from traindiff.run.verify.recipe import Recipe, Training, load_recipe

SCRIPT = """
import torch
from torch import nn

def build():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, optimizer, torch.randn(3, 5, 4), step

def two():
    return nn.Linear(2, 2), 3

def wrong():
    return "model", 3, None, None

def raising():
    raise FileNotFoundError("no data here")

def exiting():
    raise SystemExit(3)

model, optimizer, batches, step = build()

def again():
    return model, optimizer, batches, step

def broken():
    model, optimizer, _, step = build()
    return model, optimizer, torch.randn(3, 5, 3), step

def idle():
    model, optimizer, batches, _ = build()
    return model, optimizer, batches, lambda batch: model(batch).sum().backward()

def empty():
    model, optimizer, _, step = build()
    return model, optimizer, [], step

def scaled():
    model, optimizer, batches, step = build()
    skipped = iter(range(7))
    return model, optimizer, batches, lambda batch: None if next(skipped, None) is not None else step(batch)
"""


def run(*arguments: str) -> Result:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return CliRunner().invoke(app, ["doctor", *arguments])
    finally:
        torch.set_num_threads(before)


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def training(model: nn.Module, disturb: Callable[[], None] = lambda: None) -> Training:
    optimizer = SGD(model.parameters(), lr=0.1)

    def step(batch: Tensor) -> Tensor:
        loss = model(batch).square().mean()
        disturb()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Training(model=model, optimizer=optimizer, batches=torch.randn(9, 3, 4), step=step)


def checked(recipe: Recipe, **options: Any) -> dict[str, tuple[str, str]]:
    plan = Plan(recipe=recipe, rounds=0, **{"backend": None, **options})
    return {check.name: (check.result, check.message) for check in run_checks(plan)}


def test_this_machine_is_healthy() -> None:
    result = run("--json", "--rounds", "2", "--steps", "2")

    found = json.loads(result.stdout)
    assert result.exit_code == 0, found
    assert found["schema"] == {"name": "traindiff-doctor", "version": 1}
    assert (found["subject"], found["verdict"]) == ("the built-in model", "healthy")
    assert {check["name"]: check["result"] for check in found["checks"]} == {
        "kernel": "pass",
        "same bits with and without a recording": "pass",
        "every slot is written": "pass",
        "same bits with and without a recording, compiled with aot_eager": "pass",
        "every slot is written, compiled": "pass",
        "overhead": "pass",
    }
    overhead = found["checks"][-1]["evidence"]
    assert overhead["rounds"] == 2
    assert overhead["low"] <= overhead["ratio"] <= overhead["high"]
    assert found["versions"]["torch"] == torch.__version__


def test_a_model_of_the_user_is_checked(script: str) -> None:
    result = run(f"{script}:build", "--no-compiled", "--rounds", "0")

    assert result.exit_code == 0, result.output
    assert "pass  same bits with and without a recording" in result.stdout
    assert "skip  compiled" in result.stdout
    assert "skip  overhead" in result.stdout
    assert "No check failed." in result.stdout


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("{folder}/missing.py:build", "missing.py does not exist."),
        ("{folder}/train.py", "does not name a function in a file or module."),
        ("{folder}:build", "is not a Python file."),
        ("no_such_module:build", "there is no module no_such_module to import."),
        ("{folder}/train.py:biuld", 'Did you mean "build"?'),
        ("{folder}/train.py:two", "returned a tuple of 2."),
        ("{folder}/train.py:wrong", "model\n    is a str, not a torch.nn.Module."),
        ("{folder}/train.py:wrong", "optimizer\n    is an int, not a torch.optim.Optimizer."),
        ("{folder}/train.py:wrong", "step\n    is None, not a function."),
        ("{folder}/train.py:raising", "calling it raised FileNotFoundError: no data here"),
        ("{folder}/train.py:exiting", "calling it raised SystemExit: 3"),
        ("{folder}/broken.py:build", "raised SyntaxError"),
        ("{folder}/exits.py:build", "raised SystemExit: no arguments"),
    ],
)
def test_a_recipe_that_cannot_be_used_is_an_error_that_says_why(named: str, message: str, script: str) -> None:
    folder = Path(script).parent
    (folder / "broken.py").write_text("def build(:")
    (folder / "exits.py").write_text("raise SystemExit('no arguments')")

    result = run(named.format(folder=folder))

    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("again", "returns the same model when it is called again."),
        ("broken", "step\n    calling it raised RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
        ("empty", "Give at least one batch"),
        ("idle", "step\n    does not call step() of an optimizer, or there are no batches."),
    ],
)
def test_a_training_that_does_not_train_is_an_error_that_says_why(name: str, message: str, script: str) -> None:
    result = run(f"{script}:{name}", "--rounds", "0")

    assert result.exit_code == 2
    assert message in result.stderr


def test_a_training_may_skip_its_first_steps(script: str) -> None:
    try_out(load_recipe(f"{script}:scaled", asked_by="doctor"))


def test_an_unknown_backend_is_an_error_with_a_near_miss(script: str) -> None:
    result = run(f"{script}:build", "--backend", "inducter")

    assert result.exit_code == 2
    assert 'Did you mean "inductor"?' in result.stderr


def test_a_recording_that_disturbs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from traindiff.observe.torch.session.observations import Observations

    emit = Observations.emit

    def disturbing(self: Observations, tensor: Tensor, **about: Any) -> None:
        torch.rand(1)
        emit(self, tensor, **about)

    monkeypatch.setattr(Observations, "emit", disturbing)
    found = checked(lambda: training(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))))

    result, message = found["same bits with and without a recording"]
    assert result == "fail"
    assert message.startswith("with a recording, ")


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def rearranging(graph: Any, _: Any, *, always: bool = False) -> Callable[..., Any]:
    """A compiler that rounds in another way if a graph observes activations, as inductor may."""
    observes = any("traindiff.observe" in str(node.target) for node in graph.graph.nodes)
    factor = 1.0 + 2.0**-20 * (observes or (always and is_recording()))
    return lambda *args: tuple(one * factor for one in graph(*args))


def is_recording() -> bool:
    from traindiff.observe.torch.hooks import compiled

    return bool(compiled._calls)


@pytest.mark.parametrize("always", [False, True])
def test_compiled_code_that_activations_change_is_told_from_code_that_any_recording_changes(always: bool) -> None:
    found = checked(lambda: training(Own()), backend=partial(rearranging, always=always))

    result, message = next(one for name, one in found.items() if "recording, compiled with" in name)
    assert result == "fail"
    assert "differs (at most by " in message
    assert ("record(observe=['batch', " in message) is not always
    assert ("also if no activations are observed" in message) is always


def test_a_model_that_torch_does_not_compile_is_not_said_to_keep_its_bits() -> None:
    found = checked(lambda: training(nn.Sequential(nn.Linear(4, 2))), backend="eager")

    result, message = found["same bits with and without a recording, compiled with eager"]
    assert (result, message[:23]) == ("skip", "torch compiled nothing:")
    assert found["every slot is written, compiled"][0] == "skip"


def test_a_slot_that_is_not_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from traindiff.observe.torch.session.observations import Observations

    emit = Observations.emit

    def forgetting(self: Observations, tensor: Tensor, **about: Any) -> None:
        if about["path"] != "0":
            emit(self, tensor, **about)

    monkeypatch.setattr(Observations, "emit", forgetting)
    found = checked(lambda: training(nn.Sequential(nn.Linear(4, 2))))

    assert found["every slot is written"] == ("fail", "not written: 0")


def test_a_recording_that_fails_is_a_failed_check_and_not_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from traindiff.observe.torch.session.observations import Observations

    def failing(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(Observations, "emit", failing)
    found = checked(lambda: training(nn.Linear(4, 2)))

    assert found["same bits with and without a recording"] == ("fail", "ZeroDivisionError: by zero")
    assert "every slot is written" in found
    assert "overhead" in found


def test_a_training_that_differs_from_itself_is_not_held_against_the_recording() -> None:
    numbers = iter(range(1000))

    def recipe() -> Training:
        return training(nn.Linear(4, 2), lambda: torch.manual_seed(next(numbers)) and None)

    result, message = checked(recipe)["same bits with and without a recording"]

    assert result == "skip"
    assert message.startswith("two trainings without a recording differ")


def test_one_bit_is_a_difference() -> None:
    outcome = {"loss": torch.tensor([0.0, torch.nan])}

    assert first_difference(outcome, {"loss": torch.tensor([0.0, torch.nan])}) is None
    assert first_difference(outcome, {"loss": torch.tensor([-0.0, torch.nan])}) == "loss"
    assert first_difference(outcome, {}) == "loss"


def test_ratios_are_of_rounds_in_which_both_took_their_turn() -> None:
    clock = 0.0
    turns: list[str] = []

    def take(name: str, seconds: float) -> None:
        nonlocal clock
        turns.append(name)
        clock += seconds * (1 + len(turns) // 4)  # the machine gets slower

    found = interleaved(lambda: take("plain", 1.0), lambda: take("watched", 1.5), rounds=4, clock=lambda: clock)

    assert turns == ["plain", "watched", "watched", "plain", "plain", "watched", "watched", "plain"]
    assert (found.rounds, found.low, found.high) == (4, pytest.approx(1.25, abs=0.5), pytest.approx(1.5, abs=0.5))
    assert 1.0 < found.median < 2.0
