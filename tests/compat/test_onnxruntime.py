"""ONNX Runtime's convergence tools under their names: the same files, with right numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import traindiff
from tests.compat.onnxruntime.test_statistics import WRITTEN
from traindiff.compat.onnxruntime import (
    GlobalSubscriberManager,
    StatisticsSubscriber,
    SubscriberBase,
    _InspectActivation,
    inspect_activation,
)
from traindiff.compat.onnxruntime.merge_activation_summary import main
from traindiff.compat.onnxruntime.statistics import Statistics, load
from traindiff.errors import ConfigError, TraindiffWarning
from traindiff.storage import open_recording


@pytest.fixture(autouse=True)
def _unsubscribed() -> Iterator[None]:
    yield
    GlobalSubscriberManager.unsubscribe()


def train(model: nn.Module, *, steps: int = 2, inputs: Tensor | None = None) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        loss = model(torch.randn(30, 6) * 10 ** (1 - 3 * step) if inputs is None else inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sequential() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))


def statistics(directory: Path, name: str, *, step: int = 0) -> Statistics:
    path = directory / f"step_{step}" / name
    return load(path.read_text(), where=str(path))


def of_tensor(tmp_path: Path, tensor: Tensor) -> Statistics:
    """What is written of one tensor."""
    subscriber = StatisticsSubscriber(tmp_path / "out", override_output_dir=True)
    GlobalSubscriberManager.subscribe(nn.Identity(), [subscriber])
    inspect_activation("seen", tensor)
    return statistics(tmp_path / "out", "seen_forward")


def test_files_are_those_of_the_original_but_for_means_and_standard_deviations(tmp_path: Path) -> None:
    model = sequential()
    GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(str(tmp_path / "out"))])
    train(model)

    for theirs in sorted(WRITTEN.glob("step_*/*")):
        ours = tmp_path / "out" / theirs.parent.name / theirs.name
        if theirs.name == "order.txt":
            assert ours.read_text() == theirs.read_text()
            continue
        one, other = (load(path.read_text(), where=str(path)) for path in (theirs, ours))
        assert (one.name, one.direction, one.depth, one.shape, one.dtype) == (
            other.name, other.direction, other.depth, other.shape, other.dtype,
        )  # fmt: skip
        assert other.minimum == pytest.approx(one.minimum, rel=1e-4, abs=1e-9)
        assert other.maximum == pytest.approx(one.maximum, rel=1e-4, abs=1e-9)
        assert other.mean == pytest.approx(one.mean, rel=1e-4, abs=1e-9)
        assert other.values() == pytest.approx(one.values(), rel=1e-4, abs=2e-6)
        counts = ("num_nan", "num_infinite", "num_negative", "num_positive", "num_zero")
        assert [getattr(one, name) for name in counts] == [getattr(other, name) for name in counts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_moments_are_right_in_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = (torch.rand(40, 50, generator=torch.Generator().manual_seed(3)) * 300).to(dtype)

    found = of_tensor(tmp_path, tensor)

    exact = tensor.to(torch.float64)
    assert found.mean == pytest.approx(float(exact.mean()), rel=1e-12)
    assert found.std == pytest.approx(float(exact.std()), rel=1e-7)
    assert (found.minimum, found.maximum) == (float(exact.min()), float(exact.max()))


def test_whole_numbers_and_booleans_have_moments_too(tmp_path: Path) -> None:
    tensor = torch.arange(-3, 20)

    found, mask = of_tensor(tmp_path, tensor), of_tensor(tmp_path, tensor > 4)

    assert (found.minimum, found.maximum, found.mean) == (-3, 19, 8.0)
    assert found.std == pytest.approx(float(tensor.to(torch.float64).std()))
    assert (found.num_negative, found.num_zero, found.num_positive) == (3, 1, 19)
    assert (mask.mean, mask.num_zero) == (15 / 23, 8)


def test_what_is_not_finite_is_counted_and_shows_as_in_torch(tmp_path: Path) -> None:
    infinite = of_tensor(tmp_path, torch.tensor([1.0, float("inf")]))
    odd = of_tensor(tmp_path, torch.tensor([1.0, float("nan"), float("-inf")]))

    assert (infinite.maximum, infinite.mean, infinite.num_infinite) == (float("inf"), float("inf"), 1)
    assert (odd.num_nan, odd.num_infinite, odd.num_negative, odd.num_positive) == (1, 1, 1, 1)
    assert str(odd.minimum) == str(odd.mean) == str(odd.std) == "nan"


def test_empty_tensors_are_written_like_others(tmp_path: Path) -> None:
    found = of_tensor(tmp_path, torch.empty(0, 4))

    assert (found.shape, found.count, found.values()) == ((0, 4), 0, [])


def test_printing_is_left_as_it_was(tmp_path: Path) -> None:
    before = str(torch.tensor([1.23456789]))

    of_tensor(tmp_path, torch.tensor([1.23456789]))

    assert str(torch.tensor([1.23456789])) == before


class Twice(nn.Module):
    """Calls one layer two times, and names two tensors alike."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for _ in range(2):
            x = inspect_activation("hidden", self.fc(x))
        return {"x": x, "none": torch.empty(0)}


def test_a_module_that_is_called_twice_and_a_name_that_is_used_twice_are_numbered(tmp_path: Path) -> None:
    model = Twice()
    GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(tmp_path / "out")])
    model(torch.ones(3, 6))["x"].sum().backward()

    order = (tmp_path / "out" / "step_0" / "order.txt").read_text().splitlines()
    assert order == [
        "Linear_1_0th_output_forward", "hidden_forward", "Linear_1_0th_output_call_1_forward", "hidden_call_1_forward",
        "Twice_0_0th_output_forward", "Twice_0_1th_output_forward", "Twice_0_0th_output_backward",
        "hidden_call_1_backward", "Linear_1_0th_output_call_1_backward", "hidden_backward",
        "Linear_1_0th_output_backward",
    ]  # fmt: skip


def test_the_original_call_for_an_intermediate_tensor_works_with_four_arguments(tmp_path: Path) -> None:
    GlobalSubscriberManager.subscribe(nn.Identity(), [StatisticsSubscriber(tmp_path / "out")])
    tensor = torch.ones(2, requires_grad=True)

    same = _InspectActivation.apply("seen", None, GlobalSubscriberManager.get_run_context(), tensor)
    same.sum().backward()

    assert same is tensor
    assert sorted(path.name for path in (tmp_path / "out" / "step_0").iterdir()) == [
        "order.txt", "seen_backward", "seen_forward",
    ]  # fmt: skip


def test_what_is_no_tensor_is_passed_on(tmp_path: Path) -> None:
    GlobalSubscriberManager.subscribe(nn.Identity(), [StatisticsSubscriber(tmp_path / "out")])

    assert inspect_activation("seen", None) is None  # type: ignore[arg-type]


def test_without_a_subscriber_an_intermediate_tensor_is_just_passed_on() -> None:
    tensor = torch.ones(2)

    assert inspect_activation("seen", tensor) is tensor


def test_the_training_computes_the_same_bits(tmp_path: Path) -> None:
    inputs = torch.randn(4, 6)
    plain = train(sequential(), inputs=inputs, steps=3)
    model = sequential()
    GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(tmp_path / "out")])

    assert train(model, inputs=inputs, steps=3) == plain


def test_the_last_step_is_left_out(tmp_path: Path) -> None:
    model = sequential()
    GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(tmp_path / "out", start_step=1, end_step=3)])
    train(model, steps=5, inputs=torch.ones(2, 6))

    assert sorted(path.name for path in (tmp_path / "out").glob("step_*")) == ["step_1", "step_2"]


def test_nothing_is_left_on_the_model(tmp_path: Path) -> None:
    model = sequential()
    GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(tmp_path / "first")])
    GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(tmp_path / "second")])
    model(torch.ones(1, 6))
    GlobalSubscriberManager.unsubscribe()

    assert not any(module._forward_hooks for module in model.modules())
    assert not (tmp_path / "first" / "step_0").exists()


def test_the_recording_beside_the_files_has_the_models_own_names(tmp_path: Path) -> None:
    model = nn.DataParallel(sequential())
    GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(tmp_path / "out")])
    train(model, inputs=torch.ones(2, 6))
    GlobalSubscriberManager.unsubscribe()

    (first, second) = open_recording(tmp_path / "out" / "recording").steps(0)
    assert (first.step, second.step) == (0, 1)
    assert [(one.phase, one.path, one.slot) for one in first.observations][:3] == [
        ("forward", "0", "output[0]"), ("forward", "1", "output[0]"), ("forward", "2", "output[0]"),
    ]  # fmt: skip


def test_two_runs_are_compared_by_their_recordings(tmp_path: Path) -> None:
    for name, factor in (("pt", 1.0), ("ort", 1.01)):
        model = sequential()
        with torch.no_grad():
            model[2].weight.mul_(factor)
        GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(tmp_path / name)])
        train(model, inputs=torch.ones(2, 6))
        GlobalSubscriberManager.unsubscribe()

    first = traindiff.compare(tmp_path / "pt" / "recording", tmp_path / "ort" / "recording").first_divergence

    assert first is not None
    assert (first.step, first.phase, first.path) == (0, "forward", "2")


@pytest.mark.parametrize("content", ["step_0/order.txt", "notes.txt", "step_0/Linear_1_0th_output_forward"])
def test_a_directory_that_is_taken_is_refused_and_only_an_earlier_run_is_replaced(content: str, tmp_path: Path) -> None:
    path = tmp_path / "out" / content
    path.parent.mkdir(parents=True)
    path.write_text("")

    with pytest.raises(ConfigError, match="nothing was written"):
        StatisticsSubscriber(tmp_path / "out")
    if content == "step_0/order.txt":
        subscriber = StatisticsSubscriber(tmp_path / "out", override_output_dir=True)
        assert path.exists()
        GlobalSubscriberManager.subscribe(nn.Identity(), [subscriber])
    else:
        with pytest.raises(ConfigError, match="holds other things"):
            StatisticsSubscriber(tmp_path / "out", override_output_dir=True)
    assert path.exists() == (content != "step_0/order.txt")


def test_what_cannot_follow_is_refused(tmp_path: Path) -> None:
    subscriber = StatisticsSubscriber(tmp_path / "out")

    with pytest.raises(ConfigError, match="is a function"):
        GlobalSubscriberManager.subscribe(lambda x: x, [subscriber])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is a StatisticsSubscriber, and no list"):
        GlobalSubscriberManager.subscribe(nn.Identity(), subscriber)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="nobody would follow"):
        GlobalSubscriberManager.subscribe(nn.Identity(), [])
    with pytest.raises(ConfigError, match="not those of onnxruntime itself"):
        GlobalSubscriberManager.subscribe(nn.Identity(), ["subscriber"])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="finds none that is subscribed"):
        GlobalSubscriberManager.get_subscriber(StatisticsSubscriber)
    GlobalSubscriberManager.subscribe(nn.Identity(), [subscriber])
    assert GlobalSubscriberManager.get_subscriber(StatisticsSubscriber) is subscriber
    assert issubclass(StatisticsSubscriber, SubscriberBase)


def test_a_file_that_cannot_be_written_ends_the_statistics_and_not_the_training(tmp_path: Path) -> None:
    model = sequential()
    GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(tmp_path / "out")])
    (tmp_path / "out" / "step_0").write_text("in the way")

    with pytest.warns(TraindiffWarning, match="could not be written") as caught:
        losses = train(model, inputs=torch.ones(2, 6))
    assert len(losses) == 2
    assert len(caught) == 1


def test_every_rank_writes_into_a_directory_of_its_own(tmp_path: Path) -> None:
    code = """
import sys, torch
from traindiff.compat.onnxruntime import GlobalSubscriberManager, StatisticsSubscriber
model = torch.nn.Linear(2, 2)
GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(sys.argv[1], override_output_dir=True)])
model(torch.ones(1, 2)).sum().backward()
"""
    for rank in (1, 0):
        environment: dict[str, Any] = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"}
        subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], env=environment, check=True, timeout=120)

    assert [(tmp_path / "out" / f"rank_{rank}" / "step_0" / "order.txt").is_file() for rank in (0, 1)] == [True, True]
    assert open_recording(tmp_path / "out" / "recording").ranks == (0, 1)


def test_merging_joins_the_files_of_each_step_in_the_order_of_the_first_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = sequential()
    GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(tmp_path / "ort")])
    train(model)
    GlobalSubscriberManager.unsubscribe()
    (tmp_path / "ort" / "step_1" / "ReLU_2_0th_output_forward").unlink()
    arguments = ["--pt_dir", str(WRITTEN), "--ort_dir", str(tmp_path / "ort"), "--output_dir", str(tmp_path / "out")]

    assert main(arguments) == 0

    step = WRITTEN / "step_0"
    joined = "".join((step / name).read_text() + "\n" for name in (step / "order.txt").read_text().splitlines())
    assert (tmp_path / "out" / "merge_pt" / "step_0_.txt").read_text() == joined
    assert sorted(path.name for path in (tmp_path / "out" / "merge_ort").iterdir()) == ["step_0_.txt", "step_1_.txt"]
    assert "ReLU_2_0th_output_forward is not there" in capsys.readouterr().err
    assert main(arguments) == 2
    assert "is there already" in capsys.readouterr().err
    assert main([*arguments, "--overwrite"]) == 0
    (tmp_path / "out" / "notes.txt").write_text("")
    assert main([*arguments, "--overwrite"]) == 2
    assert main([*arguments[:1], str(tmp_path), *arguments[2:]]) == 2
