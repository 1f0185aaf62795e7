"""What can go wrong with a watch itself."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import traindiff
from tests.observe.nonfinite.trainings import WIDTH, Net, train


def test_every_setting_that_is_wrong_is_listed() -> None:
    with pytest.raises(traindiff.ConfigError) as caught:
        traindiff.watch(
            nn.Linear(2, 2), frames=0, trace="x", abort_after=-1, on_detect="rise", output=3, masks=[1], warn="zero",
            keep_inputs=1, file=7,
        )  # type: ignore[arg-type]  # fmt: skip
    message = str(caught.value)
    assert message.startswith("9 problems in watch(...); nothing was attached to the model.")
    for part in ('Did you mean "raise"?', 'Did you mean "zeros"?', "watch(frames=0)", "watch(keep_inputs=1)"):
        assert part in message


def test_a_misspelt_setting_is_named() -> None:
    with pytest.raises(traindiff.ConfigError, match=r'Did you mean "frames"\?'):
        traindiff.watch(nn.Linear(2, 2), frame=3)  # type: ignore[call-arg]


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(traindiff.ConfigError, match=r"watch\(model=...\)\n    is a list, not a torch.nn.Module"):
        traindiff.watch([1])  # type: ignore[arg-type]


def test_a_model_without_parameters_is_watched() -> None:
    model = nn.Sequential(nn.ReLU(), nn.Softmax(-1))
    with traindiff.watch(model, output=None, file=io.StringIO()):
        model(torch.ones(2, 3))
        with pytest.raises(traindiff.NonFiniteError, match="The batch"):
            model(torch.full((2, 3), float("nan")))


def test_a_second_watch_of_a_model_is_refused_and_the_first_one_goes_on() -> None:
    model = Net()
    with traindiff.watch(model, output=None, file=io.StringIO()):
        with pytest.raises(traindiff.ConfigError, match=r"watch\(model=...\)\n    is watched already."):
            traindiff.watch(model)
        model.scale.factor = float("nan")
        with pytest.raises(traindiff.NonFiniteError, match="scale output"):
            model(torch.ones(2, WIDTH))
    with traindiff.watch(model, output=None):
        pass


def test_hooks_that_the_user_has_removed_are_missed() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.watch(model, optimizer, output=None) as watch:
        for module in model.modules():
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()
        model(torch.ones(2, WIDTH)).sum().backward()
        with pytest.warns(traindiff.TraindiffWarning, match="stepped in step 0, but no module of the model was seen"):
            optimizer.step()
        optimizer.step()  # and says so once
        model.last.weight.grad.fill_(float("nan"))
        with pytest.raises(traindiff.NonFiniteError, match=r"gradient of last\.weight"):
            optimizer.step()
    assert watch.step == 2


def test_a_module_of_which_the_user_has_removed_the_hooks_is_missed() -> None:
    def removes(model: Any, _: Any, step: int) -> None:
        if step == 1:
            model.last._forward_hooks.clear()

    with pytest.warns(traindiff.TraindiffWarning, match=r"in step 1 the hooks of last are gone") as warned:
        train(breaks=removes, steps=4)
    assert len(warned) == 1


def test_a_forward_that_raises_shows_the_frames_so_far() -> None:
    class Raises(Net):
        def forward(self, x: torch.Tensor) -> Any:
            super().forward(x)
            raise IndexError("on purpose")

    file = io.StringIO()
    with pytest.raises(IndexError):
        train(make=Raises, file=file)

    assert file.getvalue().startswith(
        "\nIndexError in (root) during batch_number=0; nothing was NaN or infinite before.\n"
    )
    assert "Last 5 forward frames:" in file.getvalue()
    assert "steep Steep" in file.getvalue()


def test_a_forward_that_raised_and_was_caught_leaves_the_next_one_alone() -> None:
    model = Net()
    with traindiff.watch(model, output=None, file=io.StringIO()):
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(2, 3))
        model(torch.ones(2, WIDTH))
        model.scale.factor = float("nan")
        with pytest.raises(traindiff.NonFiniteError, match="scale output holds NaN; what Scale was given is finite"):
            model(torch.ones(2, WIDTH))


def test_a_watch_inside_a_recording_and_around_one(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with traindiff.record(tmp_path / "inside", model, optimizer), traindiff.watch(model, optimizer, output=None):
        step()
    with traindiff.watch(model, optimizer, output=None), traindiff.record(tmp_path / "around", model, optimizer):
        step()
        model.scale.factor = float("nan")
        with pytest.raises(traindiff.NonFiniteError, match="scale output"):
            step()
    for name in ("inside", "around"):
        assert list(traindiff.open_recording(str(tmp_path / name)).steps(0))


def test_a_directory_that_cannot_be_written_costs_the_tensors_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")

    def breaks(model: Any, _: Any, _step: int) -> None:
        model.scale.factor = float("nan")

    unsaved = pytest.warns(traindiff.TraindiffWarning, match="the tensors could not be saved")
    with unsaved, pytest.raises(traindiff.NonFiniteError, match="scale output"):
        train(breaks=breaks, output=tmp_path / "taken")


def _breaks(model: Any, _: Any, _step: int) -> None:
    model.scale.factor = float("nan")


def test_a_file_that_cannot_be_printed_to_costs_the_frames_and_nothing_else(tmp_path: Path) -> None:
    with (tmp_path / "closed").open("w") as file:
        pass
    unprinted = pytest.warns(traindiff.TraindiffWarning, match="frames could not be printed: I/O operation on closed")
    with unprinted, pytest.raises(traindiff.NonFiniteError, match="scale output"):
        train(breaks=_breaks, file=file)


def test_a_disk_that_is_full_costs_the_tensors_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: No space left on device (os error 28)")

    monkeypatch.setattr("traindiff.observe.torch.nonfinite.saved_call.save_file", full)
    unsaved = pytest.warns(traindiff.TraindiffWarning, match="the tensors could not be saved: .* No space left")
    with unsaved, pytest.raises(traindiff.NonFiniteError, match="scale output") as caught:
        train(breaks=_breaks, output=tmp_path)
    assert "traindiff rerun" not in str(caught.value)


def test_what_the_users_function_raises_ends_the_training() -> None:
    class StopError(Exception):
        pass

    def stop(origin: traindiff.Origin) -> None:
        raise StopError(origin.path)

    with pytest.raises(StopError, match="scale"):
        train(breaks=_breaks, on_detect=stop)


def test_a_fault_of_the_watch_itself_says_what_is_no_longer_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr("traindiff.observe.torch.nonfinite.module_calls.ModuleCalls._add_lines", fails)
    with pytest.warns(
        traindiff.TraindiffWarning,
        match=r"A part of watch\(\.\.\.\) \(module_calls\) failed and watches nothing more: ZeroDivisionError: on purp",
    ):
        watch, _ = train()
    assert watch.origins == []


def test_tensors_that_stand_for_others_give_no_early_sign_and_end_no_training() -> None:
    model = nn.Linear(WIDTH, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.watch(model, optimizer, output=None) as watch:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model(torch.empty(4, WIDTH))
        model(torch.randn(4, WIDTH)).sum().backward()
        optimizer.step()
    assert watch.step == 1


def test_a_list_that_holds_itself_is_looked_into_so_deep_and_no_deeper() -> None:
    class Keeps(nn.Module):
        def forward(self, x: Tensor, kept: list[Any]) -> Tensor:
            return x + kept[0]

    kept: list[Any] = [torch.ones(3)]
    kept.append(kept)
    with traindiff.watch(nn.Sequential(model := Keeps()), output=None) as watch:
        model(torch.ones(3), kept)
    assert watch.origins == []
