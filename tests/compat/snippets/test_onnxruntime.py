"""What ONNX Runtime's convergence notes tell users to write, and what its own tests of the hooks check."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.compat.snippets.moving import run
from traindiff.compat.onnxruntime import GlobalSubscriberManager

SUBSCRIBING = """
    from onnxruntime.training.utils.hooks import GlobalSubscriberManager, StatisticsSubscriber

    GlobalSubscriberManager.subscribe(model, [StatisticsSubscriber(output_dir={output_dir!r}, override_output_dir=True{more})])
"""  # noqa: E501  as it is documented
INSPECTING = "from onnxruntime.training.utils.hooks import inspect_activation"
INSPECTING_AS_TESTED = """
    from onnxruntime.training.utils.hooks import GlobalSubscriberManager, _InspectActivation

    def inspect_activation(name, tensor):
        return _InspectActivation.apply(name, None, GlobalSubscriberManager.get_run_context(), tensor)
"""


@pytest.fixture(autouse=True)
def _unsubscribed() -> Iterator[None]:
    yield
    GlobalSubscriberManager.unsubscribe()


class Model(nn.Module):
    """Linear, ReLU, Linear on the sum of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.relu, self.fc2 = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 32)

    def seen(self, name: str, tensor: Tensor) -> Tensor:
        return tensor

    def forward(self, one: Tensor, other: Tensor) -> Any:
        return self.fc2(self.seen("relu_out", self.relu(self.seen("fc1_out", self.fc1(one + other)))))


class TwoOutputs(Model):
    def forward(self, one: Tensor, other: Tensor) -> Any:
        return super().forward(one, other), one + other


def moved(snippet: str, **names: Any) -> dict[str, Any]:
    was, now = "onnxruntime.training.utils.hooks", "traindiff.compat.onnxruntime"
    return run(snippet, was=was, now=now, **names)


def train(model: nn.Module, *, steps: int = 5) -> None:
    one = torch.randn(4, 8, requires_grad=True)
    for _ in range(steps):
        found = model(one, torch.randn(4, 8))
        sum(output.sum() for output in (found if isinstance(found, tuple) else (found,))).backward()


def both(*names: str) -> set[str]:
    return {f"{name}_{direction}" for name in names for direction in ("forward", "backward")}


LAYERS = ("Linear_1_0th_output", "ReLU_2_0th_output", "Linear_3_0th_output")


@pytest.mark.parametrize(
    ("kind", "inspecting", "names"),
    [
        (Model, "", (*LAYERS, "Model_0_0th_output")),
        (TwoOutputs, "", (*LAYERS, "TwoOutputs_0_0th_output", "TwoOutputs_0_1th_output")),
        (Model, INSPECTING, (*LAYERS, "Model_0_0th_output", "fc1_out", "relu_out")),
        (Model, INSPECTING_AS_TESTED, (*LAYERS, "Model_0_0th_output", "fc1_out", "relu_out")),
    ],
)
@pytest.mark.filterwarnings("ignore:StatisticsSubscriber. the recording .* could not be completed")
def test_every_step_has_a_file_for_each_activation_and_gradient(
    kind: type[Model], inspecting: str, names: tuple[str, ...]
) -> None:
    model = kind()
    if inspecting:
        model.seen = moved(inspecting)["inspect_activation"]  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as directory:  # which ends before the subscription does
        out = os.path.join(directory, "torch_out")  # noqa: PTH118
        moved(SUBSCRIBING.format(output_dir=out, more=""), model=model)
        train(model)

        for step in range(5):
            assert set(os.listdir(os.path.join(out, f"step_{step}"))) == {"order.txt", *both(*names)}  # noqa: PTH118, PTH208


def test_steps_are_chosen_and_activations_may_be_summarized_on_the_cpu(tmp_path: Path) -> None:
    model = Model()
    more = ", start_step=1, end_step=3, run_on_cpu=True, bucket_size=1024"
    moved(SUBSCRIBING.format(output_dir=str(tmp_path / "pt_out"), more=more), model=model)
    train(model)

    assert sorted(path.name for path in (tmp_path / "pt_out").glob("step_*")) == ["step_1", "step_2"]


def test_both_runs_are_merged_by_the_command(tmp_path: Path) -> None:
    for name in ("pt_out", "ort_out"):
        model = Model()
        moved(SUBSCRIBING.format(output_dir=str(tmp_path / name), more=""), model=model)
        train(model, steps=2)
        GlobalSubscriberManager.unsubscribe()
    documented = (
        "python -m onnxruntime.training.utils.hooks.merge_activation_summary "
        "--pt_dir pt_out --ort_dir ort_out --output_dir output"
    )
    command = documented.replace("onnxruntime.training.utils.hooks", "traindiff.compat.onnxruntime").split()
    subprocess.run([sys.executable, *command[1:]], cwd=tmp_path, check=True, timeout=120)

    for side in ("merge_pt", "merge_ort"):
        found = sorted((tmp_path / "output" / side).iterdir())
        assert [path.name for path in found] == ["step_0_.txt", "step_1_.txt"]
        assert all(path.read_text().count(" run shape: ") == 8 for path in found)
