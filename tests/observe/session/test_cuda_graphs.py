"""Hooks that run while a CUDA graph is captured observe nothing, and the recording says so.

tests/gpu captures real graphs. Here a training only says that it captures one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import traindiff
from traindiff.observe.torch.session import observations

STEPS, CAPTURED = 4, 2


def train(path: Path | None, capturing: pytest.MonkeyPatch) -> list[Tensor]:
    """The parameters after steps of which one is captured."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    run = None if path is None else traindiff.record(path, model, optimizer)
    for step in range(STEPS):
        capturing.setattr(observations, "is_capturing", lambda step=step: step == CAPTURED)
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
    if run is not None:
        run.close()
    return [one.detach() for one in model.parameters()]


def test_a_captured_step_is_left_out_with_one_warning_and_the_training_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(None, monkeypatch)

    with pytest.warns(traindiff.TraindiffWarning, match="nothing inside it is observed") as warned:
        recorded = train(tmp_path / "run", monkeypatch)

    assert all(torch.equal(one, other) for one, other in zip(recorded, plain, strict=True))
    assert len(warned) == 1
    steps = list(traindiff.open_recording(str(tmp_path / "run")).steps(0))
    assert [len(step.observations) > 1 for step in steps] == [step != CAPTURED for step in range(STEPS)]
    result = traindiff.check(tmp_path / "run")
    assert result.verdict == "incomplete"
    assert "CUDA graph" in str(result)
