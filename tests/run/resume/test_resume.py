"""Each thing that a resume can leave out is named."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import traindiff
from tests.run.resume.recipes import by_default, complete, training, without
from traindiff.analyse.compare.resumption import Resumption
from traindiff.errors import ConfigError
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


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return begun(complete, tmp_path_factory.mktemp("resume") / "runs")


def resumed(recipe: Make, saved: Path, here: Path) -> Resumption:
    """Load with this recipe, train on, and judge."""
    directory = here / "runs"
    shutil.copytree(saved, directory)
    parts = stages(directory)
    run_stage(recipe, parts[2])
    return result_of("recipe", parts)


def says(found: Resumption) -> list[str]:
    return [one.message for one in found.differences]


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
        [
            "The learning rate of optimizer.groups[0] before step 3 is 0.01; it was 0.005: the scheduler was not "
            "restored."
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
        ["NumPy's generator was not restored: dropout masks, shuffles and samples cannot be the same."],
    ),
    "Python's generator": (
        without("python"),
        ["Python's generator was not restored: dropout masks, shuffles and samples cannot be the same."],
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
    alone = omitted not in ("parameters", "optimizer")
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

        def step(batch: Tensor) -> Tensor:
            loss: Tensor = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        def save(path: Path) -> None:
            torch.save([model.state_dict(), optimizer.state_dict(), torch.get_rng_state()], path / "a.pt")

        def load(path: Path) -> int:
            one, other, state = torch.load(path / "a.pt", weights_only=True)
            model.load_state_dict(one)
            optimizer.load_state_dict(other)
            torch.manual_seed(9) if forgets else torch.set_rng_state(state)
            return AT

        return traindiff.Training(
            model=model, optimizer=optimizer, batches=torch.randn(8, 4, 3), step=step, save=save, load=load
        )  # fmt: skip

    directory = begun(lambda: recipe(forgets=False), tmp_path / "saved")
    found = resumed(lambda: recipe(forgets=True), directory, tmp_path)

    assert (found.verdict, says(found)) == ("identical", [])
    assert found.notes[0] == (
        "Torch's generator is not in the state in which it was saved: the training did not draw from it in these steps."
    )


class Decaying(torch.optim.SGD):
    """Decays weights by a rate that does not depend on the learning rate, as a step without gradients does too."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.99)
        return super().step(closure)


def test_the_dummy_step_of_distributed_checkpoints_is_found(tmp_path: Path) -> None:
    """To make the optimizer's state, torch.distributed.checkpoint steps it once with a learning rate of 0."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    def recipe() -> traindiff.Training:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = Decaying(model.parameters(), lr=0.05, momentum=0.9)

        def step(batch: Tensor) -> Tensor:
            loss: Tensor = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        def save(path: Path) -> None:
            torch.save([model.state_dict(), get_optimizer_state_dict(model, optimizer)], path / "a.pt")

        def load(path: Path) -> int:
            weights, state = torch.load(path / "a.pt", weights_only=True)
            model.load_state_dict(weights)
            set_optimizer_state_dict(model, optimizer, state)
            return AT

        return traindiff.Training(
            model=model, optimizer=optimizer, batches=torch.randn(8, 16, 4), step=step, save=save, load=load
        )  # fmt: skip

    found = resumed(recipe, begun(recipe, tmp_path / "saved"), tmp_path)

    assert found.verdict == "diverged"
    assert says(found) == [
        "all 4 parameters (0.weight, 0.bias, ...) have other values than were saved: the first differs by 0.01 of its "
        "size (relative L2)."
    ]


class Muon(torch.optim.Optimizer):
    """Keeps momenta as matrices with the longer side first, and returns them like that."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                held = self.state[one].setdefault("momentum_buffer", torch.zeros_like(one))
                turned = held.shape != one.shape
                buffer = held.T if turned else held
                buffer.mul_(group["momentum"]).add_(one.grad)
                one.sub_(buffer, alpha=group["lr"])


def test_moments_that_load_into_another_shape_are_named(tmp_path: Path) -> None:
    def recipe() -> traindiff.Training:
        model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 8, bias=False))
        optimizer = Muon(model.parameters())

        def step(batch: Tensor) -> Tensor:
            loss: Tensor = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        def save(path: Path) -> None:
            torch.save([model.state_dict(), optimizer.state_dict()], path / "a.pt")

        def load(path: Path) -> int:
            weights, state = torch.load(path / "a.pt", weights_only=True)
            model.load_state_dict(weights)
            for one in state["state"].values():
                one["momentum_buffer"] = one["momentum_buffer"].T.contiguous()
            optimizer.load_state_dict(state)
            return AT

        return traindiff.Training(
            model=model, optimizer=optimizer, batches=torch.randn(8, 16, 4), step=step, save=save, load=load
        )  # fmt: skip

    found = resumed(recipe, begun(recipe, tmp_path / "saved"), tmp_path)

    assert found.verdict == "diverged"
    assert says(found)[0] == "momentum_buffer has another shape for 0.weight: [4, 8]; it was [8, 4]."
    assert says(found)[1].startswith("momentum_buffer has other values than were saved, for 2.weight")


def test_saving_that_changes_the_training_is_named(tmp_path: Path) -> None:
    def recipe() -> traindiff.Training:
        given = training()
        save = given.save
        assert save is not None

        def rounding(path: Path) -> None:
            save(path)
            given.model.bfloat16().float()

        return traindiff.Training(
            model=given.model, optimizer=given.optimizer, batches=given.batches, step=given.step, save=rounding,
            load=given.load,
        )  # fmt: skip

    found = resumed(recipe, begun(recipe, tmp_path / "saved"), tmp_path)

    assert says(found)[0].startswith("Saving changes the training: all 6 parameters (0.weight, 0.bias, ...) had other")


def test_one_of_save_and_load_alone_is_refused(tmp_path: Path) -> None:
    def recipe() -> traindiff.Training:
        given = training()
        return traindiff.Training(
            model=given.model, optimizer=given.optimizer, batches=given.batches, step=given.step, save=given.save
        )  # fmt: skip

    make_empty(tmp_path / "runs", "resume(...)")
    with pytest.raises(ConfigError, match="gives save and not load"):
        run_stage(recipe, stages(tmp_path / "runs")[0])


def test_a_load_that_returns_no_batches_is_refused(saved: Path, tmp_path: Path) -> None:
    def recipe() -> traindiff.Training:
        given = training()
        return traindiff.Training(
            model=given.model, optimizer=given.optimizer, batches=given.batches, step=given.step, save=given.save,
            load=lambda _: 1.5,
        )  # fmt: skip

    with pytest.raises(ConfigError, match="returned a float"):
        resumed(recipe, saved, tmp_path)


def test_a_checkpoint_of_the_users_own_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()

    with pytest.raises(ConfigError, match="would be replaced"):
        traindiff.resume("train.py:recipe", tmp_path, at=2)


@pytest.mark.parametrize("wrong", [{"at": 0}, {"at": 2, "steps": 0}])
def test_numbers_of_steps_that_cannot_be_are_refused(wrong: Mapping[str, int], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        traindiff.resume("train.py:recipe", tmp_path, **wrong)  # type: ignore[arg-type]


def test_optimizers_that_the_recipe_does_not_name_are_found(tmp_path: Path) -> None:
    def recipe() -> traindiff.Training:
        given = training(lambda saved: saved["optimizer"]["state"].pop(0))
        return traindiff.Training(
            model=given.model, optimizer=None, batches=given.batches, step=given.step, save=given.save, load=given.load
        )  # fmt: skip

    found = resumed(recipe, begun(recipe, tmp_path / "saved"), tmp_path)

    assert says(found) == [
        f"{slot} is not there for 0.weight: the optimizer's state was not loaded."
        for slot in ("step", "exp_avg", "exp_avg_sq")
    ]


def test_two_optimizers_go_on_where_each_of_them_was(tmp_path: Path) -> None:
    def recipe() -> traindiff.Training:
        model = nn.ModuleDict({"one": nn.Linear(4, 4), "other": nn.Linear(4, 2)})
        optimizers = {name: torch.optim.Adam(part.parameters(), lr=0.01) for name, part in model.items()}

        def step(batch: Tensor) -> Tensor:
            for name in ("other", "one"):
                loss: Tensor = model["other"](model["one"](batch)).square().mean()
                loss.backward()
                optimizers[name].step()
                model.zero_grad()
            return loss

        return traindiff.Training(model=model, optimizer=optimizers, batches=torch.randn(8, 8, 4), step=step)  # type: ignore[arg-type]

    found = resumed(recipe, begun(recipe, tmp_path / "saved"), tmp_path)

    assert (found.verdict, says(found)) == ("identical", [])


def _hand_written(*, forgets: bool) -> traindiff.Training:
    """Sets the learning rate and the generator anew in each step."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps = iter(range(100))
    done = [0]

    def step(batch: Tensor) -> Tensor:
        number = done[0] + next(steps)
        torch.manual_seed(number)
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        loss: Tensor = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def save(path: Path) -> None:
        torch.save([model.state_dict(), optimizer.state_dict()], path / "a.pt")

    def load(path: Path) -> int:
        weights, state = torch.load(path / "a.pt", weights_only=True)
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
        if forgets:
            optimizer.param_groups[0]["lr"] = 0.1
        done[0] = AT
        return AT

    return traindiff.Training(
        model=model, optimizer=optimizer, batches=torch.randn(8, 16, 4), step=step, save=save, load=load
    )  # fmt: skip


def test_what_each_step_sets_anew_need_not_be_restored(tmp_path: Path) -> None:
    directory = begun(lambda: _hand_written(forgets=False), tmp_path / "saved")

    found = resumed(lambda: _hand_written(forgets=True), directory, tmp_path)

    assert (found.verdict, says(found)) == ("identical", [])
    assert found.notes[0].endswith("The steps after it agree: the training sets it anew.")
    assert "Torch's generator was not restored: these steps have the same bits in spite of it." in found.notes
