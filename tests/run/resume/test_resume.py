"""Each thing that a resume can leave out is named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import traindiff
from tests.run.resume.parts import Make, begun, resumed, says
from tests.run.resume.recipes import by_default, complete, training, with_generator, without


def test_a_training_that_restores_everything_goes_on_exactly(saved: Path, tmp_path: Path) -> None:
    found = resumed(complete, saved, tmp_path)

    assert (found.verdict, found.exit_code, says(found), found.notes) == ("identical", 0, [], ())
    assert found.comparison.steps == (3, 4, 5)
    assert found.message == "identical: the training goes on exactly as if it had never stopped after 3 steps"


OMISSIONS: Mapping[str, tuple[Make, list[str]]] = {
    "parameter": (
        lambda: training(lambda saved: saved["model"].pop("0.weight")),
        ["0.weight was not loaded: what the recipe made is still there."],
    ),
    "parameters": (
        lambda: training(lambda saved: [saved["model"].pop(name) for name in list(saved["model"])]),
        [
            "all 6 parameters (0.weight, 0.bias, ...) were not loaded: what the recipe made is still there.",
            "The buffer 1.running_mean was not loaded: what the recipe made is still there.",
        ],
    ),
    "buffer": (
        lambda: training(lambda saved: saved["model"].pop("1.running_var")),
        ["The buffer 1.running_var was not loaded: what the recipe made is still there."],
    ),
    "optimizer": (
        without("optimizer"),
        [
            "The optimizer has no state (step, exp_avg, exp_avg_sq): it was not loaded.",
        ],
    ),
    "moment": (
        lambda: training(also=lambda has: has.optimizer.state[has.model[0].weight]["exp_avg"].zero_()),  # type: ignore[index, operator, union-attr]
        ["exp_avg is zero for 0.weight: the optimizer's state was not loaded."],
    ),
    "count of steps": (
        lambda: training(
            also=lambda has: [has.optimizer.state[one]["step"].zero_() for one in has.model[4].parameters()]
        ),  # type: ignore[index, operator, union-attr]
        ["The optimizer's step is 0 for 2 of 6 parameters (4.weight, 4.bias); it was 3."],
    ),
    "learning rate": (
        lambda: training(also=lambda has: has.optimizer.param_groups[0].update(lr=1e-2)),
        ["The learning rate of optimizer.groups[0] before step 3 is 0.01; it was 0.005: it was not restored."],
    ),
    "learning rate and scheduler": (
        lambda: training(
            lambda saved: saved.pop("scheduler"), also=lambda has: has.optimizer.param_groups[0].update(lr=1e-2)
        ),
        [
            "The learning rate of optimizer.groups[0] before step 3 is 0.01; it was 0.005: the scheduler was not "
            "restored.",
            "The scheduler has.scheduler (StepLR) was not restored (",
        ],
    ),
    "weight decay": (
        lambda: training(also=lambda has: has.optimizer.param_groups[0].update(weight_decay=0.5)),
        ["The weight_decay of optimizer.groups[0] before step 3 is 0.5; it was 0.01."],
    ),
    "scheduler": (
        without("scheduler"),
        [
            "The scheduler has.scheduler (StepLR) was not restored (last_epoch is 0; it was 3; _step_count is 1; it "
            "was 4; _last_lr[0] is 0.01; it was 0.005)."
        ],
    ),
    "scaler": (
        without("scaler"),
        ["The loss scaler has.scaler was not restored (scale is 1024; it was 2048; _growth_tracker is 0; it was 1)."],
    ),
    "torch's generator": (
        without("torch"),
        ["Torch's generator was not restored: dropout masks, shuffles and samples cannot be the same."],
    ),
    "NumPy's generator": (
        without("numpy"),
        ["NumPy's generator was not restored: the numbers drawn from it cannot be the same."],
    ),
    "Python's generator": (
        without("python"),
        ["Python's generator was not restored: the numbers drawn from it cannot be the same."],
    ),
    "averaged weights": (
        without("average"),
        ["The weights has.average (AveragedModel) was not restored ("],
    ),
    "data": (
        without("data"),
        ["The object has.data (Data) was not restored (generator has other values; position is 0; it was 3)."],
    ),
}


@pytest.mark.parametrize("omitted", OMISSIONS)
def test_what_was_left_out_is_named(omitted: str, saved: Path, tmp_path: Path) -> None:
    recipe, expected = OMISSIONS[omitted]

    found = resumed(recipe, saved, tmp_path)

    assert (found.verdict, found.exit_code) == ("diverged", 1)
    told = says(found)
    assert [one for one in expected if not any(one in message for message in told)] == [], told
    alone = omitted not in ("parameters", "optimizer", "learning rate and scheduler")
    assert not alone or len(told) == 1, told


def test_data_that_begins_again_is_found_in_the_first_batch(saved: Path, tmp_path: Path) -> None:
    first = resumed(without("data"), saved, tmp_path).comparison.first_divergence

    assert first is not None
    assert first.kind == "batch"
    assert first.message.endswith("Batch 3 of the candidate is the baseline's batch 0: the data begins again.")


def test_the_defaults_save_and_load_everything_that_the_training_holds(tmp_path: Path) -> None:
    directory = begun(by_default, tmp_path / "saved")

    found = resumed(by_default, directory, tmp_path)

    assert (found.verdict, says(found)) == ("identical", [])


def test_a_generator_from_which_nothing_is_drawn_is_only_noted(tmp_path: Path) -> None:
    def recipe(*, forgets: bool) -> traindiff.Training:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        restore = (lambda _: torch.manual_seed(9)) if forgets else torch.set_rng_state
        return with_generator(model, optimizer, torch.randn(8, 4, 3), restore=restore)

    directory = begun(lambda: recipe(forgets=False), tmp_path / "saved")
    found = resumed(lambda: recipe(forgets=True), directory, tmp_path)

    assert (found.verdict, says(found)) == ("identical", [])
    assert found.notes[0] == (
        "Torch's generator is not in the state in which it was saved: the training did not draw from it in these steps."
    )
