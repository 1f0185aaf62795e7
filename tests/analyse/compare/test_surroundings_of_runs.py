"""Flags of torch, autocast, scalers and schedulers that differ are named before the numbers that follow from them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import traindiff
from traindiff.analyse.compare import Comparison
from traindiff.analyse.compare.circumstances import approximate_in_one_run
from traindiff.storage import open_recording

Schedule = Callable[[torch.optim.Optimizer], Any]


def trained(
    path: Path, *, autocast: bool = False, schedule: Schedule | None = None, scaler: dict[str, Any] | None = None,
    **choices: Any,
) -> Path:  # fmt: skip
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, **choices)
    scheduler = schedule(optimizer) if schedule else None
    scaling = torch.amp.GradScaler("cpu", enabled=scaler is not None, **(scaler or {}))
    with traindiff.record(path, model, optimizer):
        for step in range(4):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                loss = model(x).float().square().mean()
            scaling.scale(loss).backward()
            scaling.step(optimizer)
            scaling.update()
            optimizer.zero_grad()
            if scheduler:
                scheduler.step()
    return path


def message_of(comparison: Comparison) -> str:
    assert comparison.first_divergence is not None
    return comparison.first_divergence.message


def settings_note(comparison: Comparison) -> str:
    return next((note for note in comparison.notes if note.startswith("Settings differ")), "")


def test_autocast_in_one_run_only_is_the_first_thing_said(tmp_path: Path) -> None:
    found = traindiff.compare(trained(tmp_path / "a"), trained(tmp_path / "b", autocast=True), rtol=1e-5)

    assert message_of(found).startswith("autocast: cpu is off in the baseline and bfloat16 in the candidate. ")
    assert settings_note(found).startswith("Settings differ: autocast: cpu is off in the baseline and bfloat16 in")


def step_schedule(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def test_another_scheduler_is_named_with_the_learning_rate(tmp_path: Path) -> None:
    baseline = trained(tmp_path / "a", schedule=step_schedule)
    other = trained(tmp_path / "b", schedule=lambda one: lr_scheduler.CosineAnnealingLR(one, T_max=10))
    slower = trained(tmp_path / "c", schedule=lambda one: lr_scheduler.StepLR(one, step_size=2, gamma=0.4))
    none = trained(tmp_path / "d")

    assert message_of(traindiff.compare(baseline, other)).startswith(
        "optimizer scheduler: it is StepLR in the baseline and CosineAnnealingLR in the candidate. lr is "
    )
    assert message_of(traindiff.compare(baseline, slower)).startswith(
        "optimizer scheduler: gamma is 0.5 in the baseline and 0.4 in the candidate. lr is "
    )
    assert message_of(traindiff.compare(baseline, none)).startswith(
        "optimizer scheduler: only the baseline has one (StepLR). lr is "
    )


def test_schedulers_of_schedulers_are_all_recorded(tmp_path: Path) -> None:
    def chained(optimizer: torch.optim.Optimizer) -> Any:
        parts = [lr_scheduler.ConstantLR(optimizer, 0.5), lr_scheduler.ExponentialLR(optimizer, 0.9)]
        return lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])

    held = open_recording(str(trained(tmp_path / "a", schedule=chained))).rank_content(0)["surroundings"]
    kinds = [held[name]["class"].rpartition(".")[2] for name in sorted(held) if "scheduler" in name]
    assert kinds[0] == "SequentialLR"
    assert len(kinds) >= 2
    assert "last_epoch" not in held["optimizer scheduler"]


def test_differences_that_change_no_number_stay_in_a_list(tmp_path: Path) -> None:
    scaling = {"init_scale": 4.0, "growth_interval": 1000}
    baseline = trained(tmp_path / "a", foreach=False, scaler=scaling)
    torch.use_deterministic_algorithms(mode=True)
    try:
        candidate = trained(tmp_path / "b", foreach=False, scaler={**scaling, "growth_interval": 2000})
    finally:
        torch.use_deterministic_algorithms(mode=False)
    found = traindiff.compare(baseline, candidate)

    assert found.verdict == "identical"
    assert settings_note(found) == (
        "Settings differ: scaler: growth_interval is 1000 in the baseline and 2000 in the candidate; torch: "
        "deterministic_algorithms is False in the baseline and True in the candidate."
    )
    assert not settings_note(traindiff.compare(baseline, trained(tmp_path / "c", foreach=False, scaler=scaling)))


def test_what_cannot_be_read_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from traindiff.observe.torch.hooks import surroundings

    def refuse() -> bool:
        raise RuntimeError("set in two ways")

    flags = {"cudnn_deterministic": refuse, "mkldnn": lambda: True}
    monkeypatch.setattr(surroundings, "_FLAGS", flags)

    held = open_recording(str(trained(tmp_path / "a"))).rank_content(0)["surroundings"]
    assert held["torch"] == {
        "mkldnn": "True",
        "cuda_matmul_tf32": "False",
        "cudnn_tf32": "False",
        "cudnn_recurrent": "False",
    }


def test_tf32_is_named_between_a_cpu_and_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default cuDNN rounds float32 to TF32, in convolutions and recurrent layers, and a CPU does not.

    The GPU is played by a CPU, and the rounding by a factor.
    """
    from traindiff.observe.torch.hooks import surroundings

    def run(name: str, model: nn.Module, factor: float) -> Path:
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with traindiff.record(tmp_path / name, model, optimizer):
            (factor * model(torch.ones(2, 3, 4, 4))).square().mean().backward()
            optimizer.step()
        return tmp_path / name

    def build(kind: str) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 2, 1) if kind == "conv" else nn.Linear(4, 2))

    on_cpu = {kind: run(f"{kind}-cpu", build(kind), 1.0) for kind in ("conv", "linear")}
    monkeypatch.setattr(surroundings, "_is_on_gpu", lambda module: True)
    on_gpu = {kind: run(f"{kind}-gpu", build(kind), 1.001) for kind in ("conv", "linear")}

    assert "torch: cudnn_tf32 is False in the baseline and True in the candidate" in str(
        traindiff.compare(on_cpu["conv"], on_gpu["conv"])
    )
    assert "tf32" not in str(traindiff.compare(on_cpu["linear"], on_gpu["linear"]))


def test_schedulers_step_as_before_when_the_recording_has_ended(tmp_path: Path) -> None:
    before = lr_scheduler.LRScheduler.step
    trained(tmp_path / "a", schedule=step_schedule)
    assert lr_scheduler.LRScheduler.step is before


@pytest.mark.parametrize("factor", [1.0 + 5e-6, 1.0 + 5e-5], ids=["approximated", "wrong"])
def test_recurrent_layers_of_cudnn_are_approximate(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tanh and sigmoid are off by 5e-6 (measured on a GPU), which a factor plays here."""
    from traindiff.observe.torch.hooks import surroundings

    class Model(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.lstm, self.out = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)
            self.lstm.register_forward_hook(lambda *call: (call[2][0] * factor, call[2][1]), prepend=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.out(self.lstm(x)[0])
            return found

    def run(name: str, factor: float) -> Path:
        torch.manual_seed(0)
        model = Model(factor)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with traindiff.record(tmp_path / name, model, optimizer):
            for _ in range(2):
                model(torch.randn(5, 6, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return tmp_path / name

    on_cpu, also_on_cpu = run("cpu", 1.0), run("cpu-other", factor)
    monkeypatch.setattr(surroundings, "_is_on_gpu", lambda module: True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    on_gpu = run("gpu", factor)

    assert traindiff.compare(on_cpu, also_on_cpu).verdict == "diverged"
    found = traindiff.compare(on_cpu, on_gpu)
    assert found.verdict == ("equivalent" if factor < 1.00001 else "diverged"), str(found)
    assert "cudnn_recurrent is False in the baseline and True in the candidate" in str(found)


@pytest.mark.parametrize(
    ("flags", "approximate"),
    [((None, "False"), False), ((None, "True"), True), (("True", "True"), False), (("False", "True"), True)],
)
def test_only_a_run_that_says_so_is_approximate(flags: tuple[str | None, str | None], approximate: bool) -> None:
    """Recordings of other frameworks, and imported ones, say nothing of it."""
    runs = [[{"surroundings": {"torch": {"cudnn_recurrent": one}}} if one else {}] for one in flags]

    assert approximate_in_one_run({"rnn": "GRU", "out": "Linear"}, runs) == ({"rnn"} if approximate else set())
