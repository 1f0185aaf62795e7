"""Optimizers in all their implementations on a GPU: the replay of their updates finds nothing wrong with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim
from torch.nn import functional

import traindiff
from tests.faulty_step import at_end_of_step
from tests.gpu.training import Training

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")]

IMPLEMENTATIONS: dict[str, dict[str, Any]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "capturable": {"capturable": True},
}

SETTINGS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
    "Adam": {"weight_decay": 0.01},
    "AdamW": {"betas": (0.95, 0.9999)},
    "Adagrad": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Adadelta": {},
    "ASGD": {},
    "Rprop": {},
}


def made(name: str, parameters: Any, implementation: str) -> optim.Optimizer:
    """The optimizer; skips what torch does not have."""
    try:
        kind: Any = getattr(optim, name)
        return kind(parameters, lr=1e-2, **SETTINGS[name], **IMPLEMENTATIONS[implementation])
    except (TypeError, RuntimeError) as error:
        pytest.skip(f"torch has no such {name}: {error}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_right_update_is_called_right(
    name: str, implementation: str, dtype: torch.dtype, device: torch.device, tmp_path: Path
) -> None:
    if (name, implementation, dtype, device.type) == ("SGD", "fused", torch.bfloat16, "cpu"):
        pytest.skip("torch 2.13 updates only the last elements of such a parameter, which check tells")
    if implementation == "capturable" and device.type == "cpu":
        pytest.skip("the CPU captures nothing")
    training = Training(device=device)
    training.model.to(dtype)
    training.optimizer = made(name, training.model.parameters(), implementation)
    try:
        with traindiff.record(tmp_path / "run", training.model, training.optimizer, strict=True):
            training.run()
    except RuntimeError as error:
        if "requires all the params" not in str(error):
            raise
        pytest.skip(f"torch has no such {name}: {error}")

    check = traindiff.check(tmp_path / "run")

    assert [str(one) for one in check.findings if one.stage == "replayed"] == []


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_a_fused_update_under_a_loss_scaler_is_called_right(name: str, device: torch.device, tmp_path: Path) -> None:
    training = Training(device=device, dtype=torch.float16, scaler=True)
    training.optimizer = made(name, training.model.parameters(), "fused")
    with traindiff.record(tmp_path / "run", training.model, training.optimizer, strict=True):
        training.run()

    assert traindiff.check(tmp_path / "run").verdict == "healthy", str(traindiff.check(tmp_path / "run"))


def test_the_decay_of_the_second_moment_is_still_checked(device: torch.device, tmp_path: Path) -> None:
    """A fused AdamW whose second moment forgets 1e-3 too much is told from its rounding."""
    training = Training(device=device)
    training.optimizer = made("AdamW", training.model.parameters(), "fused")

    def forget(optimizer: optim.Optimizer, *_: Any) -> None:
        for state in optimizer.state.values():
            state["exp_avg_sq"].mul_(1.0 - 1e-3)

    at_end_of_step(training.optimizer, forget)
    with traindiff.record(tmp_path / "run", training.model, training.optimizer):
        training.run()

    assert traindiff.check(tmp_path / "run").verdict == "unhealthy"


def test_a_compiled_step_of_the_optimizer_is_called_right(device: torch.device, tmp_path: Path) -> None:
    training = Training(device=device)
    rate = torch.tensor(1e-2, device=device)
    training.optimizer = optim.AdamW(training.model.parameters(), lr=rate, capturable=device.type != "cpu")
    step = torch.compile(training.optimizer.step)
    with traindiff.record(tmp_path / "run", training.model, training.optimizer):
        data = torch.Generator().manual_seed(1)
        for _ in range(3):
            tokens = torch.randint(19, (8, 7), generator=data).to(device)
            functional.cross_entropy(training.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            step()
            training.optimizer.zero_grad()

    assert traindiff.check(tmp_path / "run").verdict in ("healthy", "incomplete")
