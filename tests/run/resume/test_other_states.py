"""States that real trainings lose: dummy steps, other shapes, several optimizers, settings that each step sets anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import traindiff
from tests.run.resume.parts import AT, begun, resumed, says
from tests.run.resume.recipes import training, with_generator


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


def test_many_parts_of_one_dictionary_or_list_are_told_in_one_sentence(tmp_path: Path) -> None:
    def recipe(*, forgets: bool = False) -> traindiff.Training:
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average = {name: one.detach().clone() for name, one in model.named_parameters()}
        scales: list[float] = []

        def step(batch: Tensor) -> Tensor:
            loss: Tensor = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scales.extend([1024.0, 2048.0])
            for name, one in model.named_parameters():
                average[name].lerp_(one.detach(), 0.1)
            return loss

        def save(path: Path) -> None:
            torch.save([model.state_dict(), average, scales], path / "a.pt")

        def load(path: Path) -> int:
            weights, averages, history = torch.load(path / "a.pt", weights_only=True)
            model.load_state_dict(weights)
            if not forgets:
                scales.extend(history)
                for name, one in average.items():
                    one.copy_(averages[name])
            return AT

        return traindiff.Training(
            model=model, optimizer=optimizer, batches=torch.randn(8, 16, 4), step=step, save=save, load=load
        )  # fmt: skip

    directory = begun(recipe, tmp_path / "saved")
    found = resumed(lambda: recipe(forgets=True), directory, tmp_path)

    assert says(found) == ["4 tensors of average (average[0.weight], average[0.bias], ...) were not restored."]
    assert "6 values of scales (scales[0], scales[1], ...) were not restored." in found.notes


class Broken:
    """Has a `state_dict` that works with some settings only, as a library's loader may."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def state_dict(self) -> dict[str, Any]:
        raise AttributeError("no state without the setting")


def test_an_object_whose_state_cannot_be_asked_for_is_looked_into(tmp_path: Path) -> None:
    def recipe(*, forgets: bool = False) -> traindiff.Training:
        model, broken = nn.Linear(4, 2), Broken()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(batch: Tensor) -> Tensor:
            noise = torch.randn(16, 4, generator=broken.generator)
            loss: Tensor = model(batch + noise).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        def save(path: Path) -> None:
            torch.save([model.state_dict(), broken.generator.get_state()], path / "a.pt")

        def load(path: Path) -> int:
            weights, state = torch.load(path / "a.pt", weights_only=True)
            model.load_state_dict(weights)
            if not forgets:
                broken.generator.set_state(state)
            return AT

        return traindiff.Training(
            model=model, optimizer=optimizer, batches=torch.randn(8, 16, 4), step=step, save=save, load=load
        )  # fmt: skip

    directory = begun(recipe, tmp_path / "saved")

    assert resumed(recipe, directory, tmp_path / "same").verdict == "identical"
    found = resumed(lambda: recipe(forgets=True), directory, tmp_path / "other")
    assert says(found)[0].startswith("The generator broken.generator was not restored")


def test_what_only_the_resumed_run_replays_is_no_divergence(tmp_path: Path) -> None:
    """The first steps of a recording are replayed: those of a resumed run are late ones of the run that went on."""

    def recipe() -> traindiff.Training:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).bfloat16()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        return with_generator(model, optimizer, torch.randn(8, 16, 4).bfloat16())

    found = resumed(recipe, begun(recipe, tmp_path / "saved"), tmp_path)

    assert (found.verdict, says(found)) == ("identical", [])
    (note,) = (one for one in found.comparison.notes if "do not move" in one)
    assert note.startswith("In the candidate, ")
    assert note.endswith("The baseline's update was not replayed in step 3: this does not tell the runs apart.")
