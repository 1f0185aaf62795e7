"""`traindiff.investigate`: whole investigations of a small training, each up to where its conclusion is final."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from typer.testing import CliRunner

import traindiff
from tests.faulty_step import at_end_of_step
from tests.run.verify.recipes import mlp, other_epsilon
from traindiff.analyse.compare.investigation import Investigation, Stage
from traindiff.cli.commands import app
from traindiff.errors import ConfigError
from traindiff.run.verify.investigation_stages import seeds
from traindiff.run.verify.recipe import Recipe

ALL = ["repeats", "seeds", "differs", "remains", "first-step", "first-site", "pinned", "operators"]

Investigate = Callable[..., Investigation]


@pytest.fixture
def investigate(tmp_path: Path) -> Investigate:
    def run(candidate: Recipe, baseline: Recipe | None = None, **options: Any) -> Investigation:
        chosen = {"steps": 2, "seeds": 1, "replicas": ("ulp:1", "ulp:2"), **options}
        return traindiff.investigate(baseline or mlp(), candidate, tmp_path / "runs", **chosen)

    return run


def names(found: Investigation) -> list[str]:
    return [stage.name for stage in found.stages]


def stage(found: Investigation, name: str) -> Stage:
    return next(one for one in found.stages if one.name == name)


def attention(*, scale: float = 0.25, dropout: float = 0.0, seeded: bool = True) -> Recipe:
    """A recipe of one layer of attention by hand.

    Args:
        scale: Of its scores.
        dropout: Of its weights, by a function.
        seeded: Whether the dropout draws from torch's generator as it is.
    """

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(16, 48)
            self.out = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, dim=-1)
            weights = (q @ k.transpose(-2, -1) * scale).softmax(dim=-1)
            if not seeded:
                torch.rand(1)
            return self.out(functional.dropout(weights, dropout, self.training) @ v)

    def recipe() -> traindiff.Training:
        model = nn.Sequential(nn.Linear(4, 16), Attention(), nn.Linear(16, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        batches = torch.randn(8, 6, 5, 4)
        return traindiff.Training(
            model=model, optimizer=optimizer, batches=batches, loss=lambda model, batch: model(batch).square().mean()
        )

    return recipe


def test_the_same_training_is_asked_no_more_than_whether_it_differs(investigate: Investigate, tmp_path: Path) -> None:
    found = investigate(mlp())

    assert names(found) == ["repeats", "seeds", "differs"]
    assert (found.verdict, found.exit_code) == ("identical", 0)
    assert stage(found, "repeats").message == "Yes: run again, it gives the same bits."
    assert stage(found, "differs").message.startswith("No: identical, every recorded tensor has the same bits.")
    spread = stage(found, "seeds").numbers["spread"]
    assert spread > 0
    assert stage(found, "seeds").message.endswith(f"a spread of {spread:.2g}.")
    assert (tmp_path / "runs" / "report.txt").read_text().count("\nVerdict: identical\n") == 1


def test_a_candidate_within_noise_is_equivalent_and_held_against_the_seed(investigate: Investigate) -> None:
    found = investigate(mlp(micro_batches=4))

    assert names(found) == ["repeats", "seeds", "differs"]
    assert (found.verdict, found.exit_code) == ("equivalent", 0)
    differs = stage(found, "differs")
    assert differs.final
    assert differs.numbers["loss_apart"] < 1e-5 * stage(found, "seeds").numbers["spread"]
    assert "x what the seed changes" in differs.message


def test_a_fault_in_one_module_ends_at_the_operator(investigate: Investigate, tmp_path: Path) -> None:
    found = investigate(mlp(other_epsilon))

    assert names(found) == ALL
    assert (found.verdict, found.exit_code) == ("diverged", 1)
    assert stage(found, "first-step").numbers == {"step": 0}
    assert stage(found, "first-site").numbers["finding"]["site"] == "2"
    assert "forward of 2 output[0]" in stage(found, "pinned").numbers["sites"]
    last = stage(found, "operators")
    assert last.numbers["operators"][0]["operator"] == "2/aten.native_layer_norm[0]"
    assert "eps = 1e-05 in the baseline, 0.001 in the candidate" in last.message

    content = json.loads((tmp_path / "runs" / "investigation.json").read_text())
    assert [one["name"] for one in content["stages"]] == ALL
    assert content["steady"]["zoomed"][0]["cause"] == "operator"
    assert "<html" in (tmp_path / "runs" / "report.html").read_text()
    report = (tmp_path / "runs" / "report.txt").read_text()
    assert [line for line in report.splitlines() if line[:2] in [f"{n}." for n in range(1, 9)]] == [
        f"{number}. {one.asks}" for number, one in enumerate(found.stages, start=1)
    ]


def test_a_fault_in_the_code_between_modules_ends_at_its_line(investigate: Investigate) -> None:
    found = investigate(attention(scale=0.5), attention())

    assert names(found) == ALL
    first = stage(found, "operators").numbers["operators"][0]
    assert (first["site"], first["module"], first["operator"]) == ("1.out", "1", "1/aten.mul[0]")
    assert first["rows"][-4]["candidate"]["code"] == "weights = (q @ k.transpose(-2, -1) * scale).softmax(dim=-1)"


def test_a_difference_that_dropout_makes_vanishes_without_it(investigate: Investigate) -> None:
    found = investigate(attention(dropout=0.4), attention(dropout=0.2))

    assert names(found) == ["repeats", "seeds", "differs", "remains"]
    assert found.verdict == "diverged"
    remains = stage(found, "remains")
    assert remains.final
    assert remains.numbers["verdict"] == "identical"
    assert remains.numbers["alone"] == {"dropout": "identical", "algorithms": "diverged", "threads": "diverged"}
    assert "no dropout alone makes it vanish." in remains.message


def test_a_recipe_that_prepares_another_training_each_time_is_said_to_be_that(investigate: Investigate) -> None:
    calls: list[None] = []

    def recipe() -> Any:
        calls.append(None)
        torch.manual_seed(len(calls))
        return mlp()()

    found = investigate(mlp(), recipe)

    assert names(found) == ["repeats"]
    assert (found.verdict, found.exit_code) == ("misaligned", 3)
    assert found.stages[0].message.startswith("No, it is not the same training when it is called again. step 0, ")
    assert "starts with other values" in found.stages[0].message


def test_a_baseline_that_is_not_deterministic_is_named_by_its_first_site_and_is_no_reason_to_stop(
    investigate: Investigate,
) -> None:
    calls: list[None] = []

    def unsteady() -> Any:
        calls.append(None)
        number = len(calls)

        def disturb(_module: nn.Module, _: Any, output: Tensor) -> Tensor:
            return output + 1e-7 * number * output.abs()

        return mlp(lambda model: model[1].register_forward_hook(disturb))()

    found = investigate(mlp(), unsteady)

    repeats = stage(found, "repeats")
    assert not repeats.final
    assert repeats.numbers["first"]["site"] == "1"
    assert repeats.message.startswith(
        "Not to the bit: it first differs at step 0, micro-step 0, forward, 1 output[0], by "
    )
    assert names(found)[:3] == ["repeats", "seeds", "differs"]
    assert found.verdict == "equivalent"


def test_a_candidate_that_crashes_ends_the_investigation_with_where_it_was(investigate: Investigate) -> None:
    def crashing() -> Any:
        training = mlp()()
        steps: list[None] = []

        def step(batch: Tensor) -> Any:
            steps.append(None)
            if len(steps) == 2:
                raise RuntimeError("out of luck")
            return training.train_on(batch)

        return traindiff.Training(
            model=training.model, optimizer=training.optimizer, batches=training.batches, step=step
        )

    found = investigate(crashing)

    assert names(found) == ["repeats", "seeds", "differs"]
    assert (found.verdict, found.exit_code) == ("incomplete", 3)
    differs = stage(found, "differs")
    assert differs.message.startswith("The candidate fails. Rank 0 raised RuntimeError: out of luck")
    assert differs.message.endswith("Up to there: what could be compared agrees, but not everything could be.")


def failing_where(fails: Callable[[], bool]) -> Recipe:
    """The small training, which breaks off in its second step where that is asked for."""

    def recipe() -> traindiff.Training:
        training = mlp()()
        left = 1

        def step(batch: Tensor) -> Any:
            nonlocal left
            left -= 1
            if left < 0 and fails():
                raise RuntimeError("out of luck")
            return training.step(batch)

        return replace(training, step=step)

    return recipe


def test_a_baseline_that_fails_with_another_seed_is_said_and_no_reason_to_stop(investigate: Investigate) -> None:
    baseline = failing_where(lambda: torch.initial_seed() == 1)
    found = investigate(baseline, baseline, seeds=2)

    assert names(found) == ["repeats", "seeds", "differs"]
    assert found.verdict == "identical"
    of_seeds = stage(found, "seeds")
    assert sorted(of_seeds.numbers["losses"]) == ["0", "2"]
    assert " With seed 1 the baseline fails. Rank 0 raised RuntimeError: out of luck" in of_seeds.message
    alone = investigate(baseline, baseline, seeds=1)
    assert stage(alone, "seeds").message.startswith("With seed 1 the baseline fails.")


def test_a_baseline_that_fails_without_what_varies_ends_it_there(investigate: Investigate) -> None:
    found = investigate(mlp(other_epsilon), failing_where(torch.are_deterministic_algorithms_enabled))

    assert names(found) == ["repeats", "seeds", "differs", "remains"]
    assert found.verdict == "diverged"
    remains = stage(found, "remains")
    assert remains.final
    assert remains.message.startswith("That is not known: run so, the baseline fails. Rank 0 raised RuntimeError")


def test_a_baseline_that_fails_is_refused_and_the_report_says_how(investigate: Investigate, tmp_path: Path) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("out of luck")

    with pytest.raises(traindiff.ConfigError, match="out of luck"):
        investigate(mlp(), mlp(before_step=fail))

    assert "Rank 0 raised RuntimeError: out of luck" in (tmp_path / "runs" / "report.txt").read_text()
    found = json.loads((tmp_path / "runs" / "investigation.json").read_text())
    assert [stage["name"] for stage in found["stages"]] == ["repeats"]
    assert found["verdict"] == "incomplete"


def test_other_batches_are_the_end_of_the_investigation(investigate: Investigate) -> None:
    def others() -> Any:
        training = mlp()()
        training.batches.mul_(2.0)  # type: ignore[attr-defined]
        return training

    found = investigate(others)

    assert names(found) == ["repeats", "seeds", "differs"]
    assert (found.verdict, found.exit_code) == ("misaligned", 3)
    assert "It was not given the same to compute." in stage(found, "differs").message


def test_stages_are_told_while_they_come(tmp_path: Path) -> None:
    seen: list[str] = []

    traindiff.investigate(
        mlp(), mlp(), tmp_path, steps=1, seeds=0, replicas=("ulp:1",), on_stage=lambda one: seen.append(one.name)
    )

    assert seen == ["repeats", "seeds", "differs"]


def test_a_loss_that_is_not_finite_is_said_and_written(investigate: Investigate, tmp_path: Path) -> None:
    def broken(model: nn.Sequential) -> None:
        model[1].register_forward_hook(lambda _, __, output: output * float("nan"))

    found = investigate(mlp(broken))

    assert (found.verdict, found.exit_code) == ("diverged", 1)
    differs = stage(found, "differs")
    assert differs.message.endswith("The loss of step 1 is not finite in one of them, or in both.")
    assert differs.numbers["loss_apart"] is None
    content = json.loads((tmp_path / "runs" / "investigation.json").read_text())
    assert content["stages"][2]["numbers"]["loss_apart"] is None


def test_a_baseline_whose_loss_is_not_finite_with_some_seed_has_a_spread_of_the_others() -> None:
    found = seeds({0: {1: 1.0}, 1: {1: math.nan}, 2: {1: 1.5}})

    assert found.numbers == {"step": 1, "spread": 0.5, "losses": {"0": 1.0, "1": None, "2": 1.5}}
    assert found.message.endswith("a spread of 0.5. A loss that is not finite is left out of the spread.")
    assert seeds({0: {1: math.nan}, 1: {1: math.nan}}).message.endswith("nan with seed 1. No loss is finite.")


@pytest.mark.parametrize("name", ["seed-1/baseline", "steady/candidate", "steady-threads/ulp-1"])
def test_a_recording_of_the_users_own_is_not_replaced(name: str, investigate: Investigate, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    traindiff.record(tmp_path / "runs" / name, model).close()

    with pytest.raises(ConfigError, match="is a recording that no recipe made, and would be replaced"):
        investigate(mlp())

    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [name.partition("/")[0]]


@pytest.mark.parametrize("name", ["report.txt", "report.html", "investigation.json"])
def test_a_file_of_the_users_own_is_not_replaced(name: str, investigate: Investigate, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / name).write_text("{}")

    with pytest.raises(ConfigError, match="was not written by an earlier report of traindiff, and would be replaced"):
        investigate(mlp())

    assert [path.name for path in (tmp_path / "runs").iterdir()] == [name]
    assert (tmp_path / "runs" / name).read_text() == "{}"


def test_the_files_of_an_earlier_investigation_are_replaced_or_gone(investigate: Investigate, tmp_path: Path) -> None:
    investigate(mlp(other_epsilon), steps=1, seeds=0, replicas=("ulp:1",))
    assert (tmp_path / "runs" / "report.html").exists()
    calls: list[None] = []

    def another_each_time() -> Any:
        calls.append(None)
        torch.manual_seed(len(calls))
        return mlp()()

    investigate(mlp(), another_each_time, steps=1, seeds=0, replicas=("ulp:1",))

    assert "Verdict: misaligned" in (tmp_path / "runs" / "report.txt").read_text()
    assert not (tmp_path / "runs" / "report.html").exists()


def test_settings_that_cannot_be_used_are_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"seeds=-1\n.*must be a whole number, at least 0"):
        traindiff.investigate(mlp(), mlp(), tmp_path / "runs", seeds=-1)
    with pytest.raises(ConfigError, match="steps=0"):
        traindiff.investigate(mlp(), mlp(), tmp_path / "runs", steps=0)
    assert not (tmp_path / "runs").exists()


def test_verify_zooms_into_what_it_pins_down_where_it_is_asked_to(tmp_path: Path) -> None:
    found = traindiff.verify(mlp(), mlp(other_epsilon), tmp_path, steps=1, replicas=("ulp:1",), zoom=True)

    assert found.zoomed is not None
    assert found.zoomed.comparison.zooms[0].operator == "2/aten.native_layer_norm[0]"
    assert "Operators, step 0, in its own dtypes:\n  forward of 2 output[0]: 2/aten.native_layer_norm[0]: " in str(
        found
    )
    plain = traindiff.verify(mlp(), mlp(other_epsilon), tmp_path, steps=1, replicas=("ulp:1",))
    assert (plain.zoomed, plain.zoom_note) == (None, "")


def test_what_no_module_computes_is_not_zoomed_into_and_named(tmp_path: Path) -> None:
    def halved() -> Any:
        training = mlp()()
        model = training.model
        assert isinstance(model, torch.nn.Module)

        def after(*_: Any) -> None:
            with torch.no_grad():
                for one in model.parameters():
                    one.mul_(0.9)

        at_end_of_step(training.optimizer, after)  # type: ignore[union-attr]
        return training

    found = traindiff.verify(mlp(), halved, tmp_path, steps=1, replicas=("ulp:1",), zoom=True)

    assert any(one.comparison.findings for one in found.pinned)
    assert found.zoomed is None
    assert found.zoom_note.startswith(
        "No operators were recorded: an operator of a module computes nothing of what is wrong alone (the update of "
    )
    assert "no module is wrong alone" not in str(found)


RECIPES = """
from tests.run.verify.recipes import mlp, other_epsilon

recipe = mlp()
wrong = mlp(other_epsilon)
"""


def test_the_command_tells_the_story_and_exits_like_verify(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RECIPES)
    output = tmp_path / "runs"
    arguments = [f"{tmp_path / 'train.py'}:recipe", "--steps", "1", "--seeds", "0", "--replica", "ulp:1"]
    wrong = ["--candidate", f"{tmp_path / 'train.py'}:wrong", "--output", str(output)]

    run = CliRunner().invoke(app, ["investigate", *arguments, *wrong], catch_exceptions=False)

    assert run.exit_code == 1
    assert "8. Which operator in there is the first that differs?" in run.stdout
    assert "2/aten.native_layer_norm[0]" in run.stdout
    assert run.stdout.startswith("baseline   ")
    assert run.stdout.count("1. Does the baseline repeat itself?") == 1
    assert run.stdout.rstrip().endswith(f"Files: {output}")
