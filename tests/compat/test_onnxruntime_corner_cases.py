"""What subscribers see of models that are not plain, and what they never touch."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import traindiff
from tests.compat.test_onnxruntime import of_tensor, sequential, statistics
from traindiff.compat.onnxruntime import GlobalSubscriberManager, StatisticsSubscriber, inspect_activation
from traindiff.compat.onnxruntime.importing import import_statistics
from traindiff.compat.onnxruntime.kept_recording import HELD
from traindiff.compat.onnxruntime.merge_activation_summary import main
from traindiff.errors import ConfigError, TraindiffWarning
from traindiff.storage import open_recording


@pytest.fixture(autouse=True)
def _unsubscribed() -> Iterator[None]:
    yield
    GlobalSubscriberManager.unsubscribe()


def order(directory: Path, step: int = 0) -> list[str]:
    return (directory / f"step_{step}" / "order.txt").read_text().split()


def subscribed(model: nn.Module, directory: Path) -> nn.Module:
    GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(directory, override_output_dir=True)])
    return model


class Checkpointed(nn.Module):
    """Two blocks whose activations are computed again in the backward pass."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 2)) for _ in range(2))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_what_checkpointing_computes_again_is_no_part_of_the_next_step(use_reentrant: bool, tmp_path: Path) -> None:
    for name, how in (("plain", None), ("checkpointed", use_reentrant)):
        model = subscribed(Checkpointed(how), tmp_path / name)
        for step in range(3):
            model(torch.full((3, 2), 1.0 + step, requires_grad=True)).sum().backward()
        GlobalSubscriberManager.unsubscribe()

    assert sorted(path.name for path in (tmp_path / "checkpointed").glob("step_*")) == ["step_0", "step_1", "step_2"]
    for step in range(3):
        plain, found = (order(tmp_path / name, step) for name in ("plain", "checkpointed"))
        assert sorted(found) == sorted(plain)
        for name in plain:
            one, other = (statistics(tmp_path / side, name, step=step) for side in ("plain", "checkpointed"))
            assert other.mean == pytest.approx(one.mean)


class Frozen(nn.Module):
    """Calls one layer with a graph, and then without one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        with torch.no_grad():
            z = self.fc(100 * x)
        return (y * z).sum()


def test_a_gradient_is_that_of_the_call_to_which_it_comes(tmp_path: Path) -> None:
    subscribed(Frozen(), tmp_path)(torch.ones(3, 2)).backward()

    assert order(tmp_path)[-1] == "Linear_1_0th_output_backward"


class Twice(nn.Module):
    """Calls one layer two times."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc(self.fc(x)).sum()
        return found


def test_gradients_of_several_forward_passes_that_come_together_have_files_of_their_own(tmp_path: Path) -> None:
    model = subscribed(Twice(), tmp_path)

    sum(model(torch.ones(3, 2)) for _ in range(3)).backward()

    for step in range(3):
        assert order(tmp_path, step)[-2:] == ["Linear_1_0th_output_call_1_backward", "Linear_1_0th_output_backward"]
    GlobalSubscriberManager.unsubscribe()
    steps = list(open_recording(str(tmp_path / "recording")).steps(0))
    assert [step.step for step in steps] == [0, 1, 2]
    assert [[one.phase for one in step.observations] for step in steps] == [["forward"] * 3 + ["backward"] * 3] * 3


def test_steps_without_gradients_are_held_for_a_while_and_no_longer(tmp_path: Path) -> None:
    model = subscribed(nn.Linear(2, 2), tmp_path)
    losses = [model(torch.ones(1, 2)).sum() for _ in range(HELD + 2)]

    with pytest.warns(TraindiffWarning, match="gradients of step [01] came after more than 16 further") as caught:
        sum(losses).backward()

    GlobalSubscriberManager.unsubscribe()
    steps = list(open_recording(str(tmp_path / "recording")).steps(0))
    assert len(caught) == 1
    assert [step.step for step in steps] == list(range(HELD + 2))
    assert [len(step.observations) for step in steps[1:4]] == [1, 2, 2]


class Given(nn.Module):
    """Returns its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self) -> Tensor:
        return self.weight


class Scaled(nn.Module):
    """Multiplies what another module returns."""

    def __init__(self) -> None:
        super().__init__()
        self.given = Given()

    def forward(self, factor: float) -> Tensor:
        found: Tensor = (self.given() * factor).sum()
        return found


def test_a_parameter_that_is_returned_keeps_no_hooks_of_earlier_steps(tmp_path: Path) -> None:
    model = Scaled()
    subscribed(model, tmp_path)
    for step in range(3):
        model(1.0 + step).backward()
    GlobalSubscriberManager.unsubscribe()

    found = [statistics(tmp_path, "Given_1_0th_output_backward", step=step).mean for step in range(3)]
    assert found == [1.0, 2.0, 3.0]
    assert not model.given.weight._backward_hooks


def test_a_copy_of_the_model_is_not_followed(tmp_path: Path) -> None:
    model = subscribed(sequential(), tmp_path)
    average = copy.deepcopy(model)

    model(torch.ones(2, 6))
    average(torch.ones(2, 6))
    model(torch.ones(2, 6))

    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_0", "step_1"]
    assert len(order(tmp_path, 1)) == 4


@pytest.mark.parametrize("name", ["two\nlines", "a\rb", "\u2028", "\ud800", "../../up", ">>deeper", 3])
def test_any_name_of_a_tensor_is_written_and_read(name: str, tmp_path: Path) -> None:
    subscribed(nn.Identity(), tmp_path / "out")

    inspect_activation(name, torch.ones(3))
    inspect_activation("after", torch.ones(3))

    assert len(order(tmp_path / "out")) == 2
    assert import_statistics(str(tmp_path / "out"), str(tmp_path / "run")) == 2
    GlobalSubscriberManager.unsubscribe()
    assert len(next(iter(open_recording(str(tmp_path / "out" / "recording")).steps(0))).observations) == 2


def test_a_name_that_another_has_with_its_number_is_numbered_on(tmp_path: Path) -> None:
    subscribed(nn.Identity(), tmp_path)

    for name in ("x_call_1", "x", "x"):
        inspect_activation(name, torch.ones(3))

    assert order(tmp_path) == ["x_call_1_forward", "x_forward", "x_call_2_forward"]


def test_complex_numbers_have_their_own_extremes(tmp_path: Path) -> None:
    found = of_tensor(tmp_path, torch.tensor([0.25 + 0.75j]))

    assert (found.minimum, found.maximum) == (0.25, 0.75)


def test_first_elements_are_all_printed_whatever_the_training_prints(tmp_path: Path) -> None:
    torch.set_printoptions(threshold=10)
    try:
        found = of_tensor(tmp_path, torch.arange(200.0))
    finally:
        torch.set_printoptions(profile="default")

    assert found.values() == list(range(128))


@pytest.mark.parametrize("file", ["step_0/notes.txt", "recording/notes.txt"])
def test_files_of_the_user_are_never_removed_nor_anything_beside_them(file: str, tmp_path: Path) -> None:
    subscribed(sequential(), tmp_path / "out")(torch.ones(2, 6))
    GlobalSubscriberManager.unsubscribe()
    (tmp_path / "out" / file).write_text("mine")
    before = sorted((tmp_path / "out").rglob("*"))

    with pytest.raises(ConfigError, match=r"notes\.txt"):
        GlobalSubscriberManager.subscribe(
            sequential(), [StatisticsSubscriber(tmp_path / "out", override_output_dir=True)]
        )

    assert sorted((tmp_path / "out").rglob("*")) == before


def test_merging_takes_along_what_only_later_steps_have(tmp_path: Path) -> None:
    model = subscribed(sequential(), tmp_path / "pt")
    with torch.no_grad():
        model(torch.ones(2, 6))
    model(torch.ones(2, 6)).sum().backward()
    GlobalSubscriberManager.unsubscribe()

    arguments = ["--pt_dir", str(tmp_path / "pt"), "--ort_dir", str(tmp_path / "pt"), "--output_dir"]
    assert main([*arguments, str(tmp_path / "out")]) == 0

    merged = (tmp_path / "out" / "merge_ort" / "step_1_.txt").read_text()
    assert merged.index("Sequential_0_0th_output forward") < merged.index("Sequential_0_0th_output backward")


def test_merging_again_removes_nothing_that_it_has_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subscribed(sequential(), tmp_path / "pt")(torch.ones(2, 6))
    arguments = ["--pt_dir", str(tmp_path / "pt"), "--ort_dir", str(tmp_path / "pt"), "--output_dir"]
    assert main([*arguments, str(tmp_path / "out")]) == 0
    (tmp_path / "out" / "merge_pt" / "notes.txt").write_text("mine")

    assert main([*arguments, str(tmp_path / "out"), "--overwrite"]) == 2

    assert "merge_pt/notes.txt" in capsys.readouterr().err
    assert (tmp_path / "out" / "merge_pt" / "notes.txt").read_text() == "mine"


def test_ranks_are_merged_one_by_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(2):
        (tmp_path / "pt" / f"rank_{rank}" / "step_0").mkdir(parents=True)

    arguments = ["--pt_dir", str(tmp_path / "pt"), "--ort_dir", str(tmp_path / "pt"), "--output_dir", "out"]
    assert main(arguments) == 2
    assert "holds the ranks rank_0, rank_1" in capsys.readouterr().err


@pytest.mark.parametrize("steps_before", [0, 1, 2, 5])
def test_a_directory_that_is_removed_in_between_ends_the_statistics_with_one_warning(
    steps_before: int, tmp_path: Path
) -> None:
    model = subscribed(sequential(), tmp_path / "out")
    for _ in range(steps_before):
        model(torch.ones(2, 6)).sum().backward()
    shutil.rmtree(tmp_path / "out")

    with pytest.warns(TraindiffWarning, match=r"Linear_1_0th_output of step .* the training goes on"):
        model(torch.ones(2, 6)).sum().backward()
    model(torch.ones(2, 6)).sum().backward()
    GlobalSubscriberManager.unsubscribe()

    assert not (tmp_path / "out").exists()


def test_a_directory_that_is_removed_afterwards_ends_the_recording_with_a_warning_and_another_can_begin(
    tmp_path: Path,
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        model = subscribed(sequential(), Path(directory, "out"))
        model(torch.ones(2, 6)).sum().backward()

    with pytest.warns(TraindiffWarning, match="out/recording could not be completed: .* is no longer there"):
        subscribed(model, tmp_path / "second")
    model(torch.ones(2, 6)).sum().backward()
    GlobalSubscriberManager.unsubscribe()

    assert len(order(tmp_path / "second")) == 8
    assert len(list(open_recording(str(tmp_path / "second" / "recording")).steps(0))) == 1


def test_a_directory_that_is_removed_before_the_end_of_the_process_leaves_no_traceback(tmp_path: Path) -> None:
    code = """
import shutil, sys, torch
from traindiff.compat.onnxruntime import GlobalSubscriberManager, StatisticsSubscriber
model = torch.nn.Linear(2, 2)
GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(sys.argv[1])])
model(torch.ones(1, 2)).sum().backward()
shutil.rmtree(sys.argv[1])
print("trained")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "out")], capture_output=True, text=True, check=False, timeout=120
    )

    assert (done.returncode, done.stdout) == (0, "trained\n")
    assert "could not be completed" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_recording_whose_statistics_ended_early_is_incomplete_from_that_step_on(tmp_path: Path) -> None:
    model = subscribed(sequential(), tmp_path / "out")
    for step in range(5):
        if step == 3:
            (tmp_path / "out" / "step_3").write_text("in the way")
            with pytest.warns(TraindiffWarning, match="could not be written"):
                model(torch.ones(2, 6)).sum().backward()
        else:
            model(torch.ones(2, 6)).sum().backward()
    GlobalSubscriberManager.unsubscribe()

    recording = open_recording(str(tmp_path / "out" / "recording"))
    assert [step.step for step in recording.steps(0)] == [0, 1]
    comparison = traindiff.compare(tmp_path / "out" / "recording", tmp_path / "out" / "recording")
    assert any("Linear_1_0th_output of step 3 could not be written" in note for note in comparison.notes)


def test_a_training_that_goes_to_another_directory_writes_where_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    model = subscribed(sequential(), Path("out"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    model(torch.ones(2, 6))

    assert len(order(tmp_path / "out")) == 4
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("content", [None, "step_0/order.txt", "notes.txt"])
@pytest.mark.parametrize("kind", [FileExistsError, ConfigError, ValueError])
def test_a_directory_that_is_there_is_the_error_of_the_original(
    content: str | None, kind: type[Exception], tmp_path: Path
) -> None:
    (tmp_path / "out" / "step_0").mkdir(parents=True)
    if content:
        (tmp_path / "out" / content).write_text("")
    else:
        (tmp_path / "out" / "step_0").rmdir()

    with pytest.raises(kind, match="nothing was written"):
        StatisticsSubscriber(tmp_path / "out")


def test_errors_are_those_of_the_original(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="finds none that is subscribed"):
        GlobalSubscriberManager.get_subscriber(StatisticsSubscriber)
    with pytest.raises(RuntimeError, match="nobody would follow the model"):
        GlobalSubscriberManager.subscribe(nn.Identity(), [])
    with pytest.raises(ValueError, match="is a str"):
        GlobalSubscriberManager.subscribe("model", [StatisticsSubscriber(tmp_path / "out")])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "method",
    [
        "pre_forward_module_apply", "post_forward_tensor_apply_impl", "post_forward_outmost_module_apply_impl",
        "module_post_forward_impl", "module_pre_backward_impl", "_summarize_activations",
    ],
)  # fmt: skip
def test_a_subclass_with_a_method_that_only_the_original_calls_is_refused(method: str) -> None:
    with pytest.raises(ConfigError, match=rf"{method}\n +is a method of ONNX Runtime's subscribers that traind"):
        type("Mine", (StatisticsSubscriber,), {method: lambda *_: None})


def test_a_subclass_is_told_of_every_activation_and_gradient(tmp_path: Path) -> None:
    class Noting(StatisticsSubscriber):
        def saw(self, tensor: Tensor, **about: Any) -> None:
            seen.append((about["name"], about["forward"]))
            super().saw(tensor, **about)

    seen: list[tuple[str, bool]] = []
    model = nn.Sequential(nn.Linear(2, 2))
    GlobalSubscriberManager.subscribe(model, [Noting(tmp_path / "out")])
    model(torch.ones(1, 2)).sum().backward()

    names = ["Linear_1_0th_output", "Sequential_0_0th_output"]
    assert seen == [*((name, True) for name in names), *((name, False) for name in reversed(names))]
    assert len(order(tmp_path / "out")) == 4
