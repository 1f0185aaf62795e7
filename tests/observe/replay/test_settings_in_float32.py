"""Fused Adams on devices compute with their settings in float32, so that 1 - beta2 is off by a rounding of beta2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import traindiff
from tests.faulty_step import at_end_of_step
from traindiff.observe.torch.hooks import optimizer_step
from traindiff.observe.torch.replay import formulas

BETA = 0.999
SHORT = (1.0 - float(np.float32(BETA))) / (1.0 - BETA)


def one_step(path: Path, factor: float) -> Path:
    """Record a step whose second moment is that of a kernel in which 1 - beta2 is off by a factor."""
    torch.manual_seed(0)
    model = nn.Linear(30, 20)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, BETA))

    def change(changed: Any, *_: Any) -> None:
        for state in changed.state.values():
            state["exp_avg_sq"] *= factor

    at_end_of_step(optimizer, change)
    with traindiff.record(path, model, optimizer):
        model(torch.randn(8, 30)).square().mean().backward()
        optimizer.step()
    return path


def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (formulas, optimizer_step):
        monkeypatch.setattr(module, "settings_in_float32", lambda _: True)


def test_only_fused_ones_on_devices_do() -> None:
    on_cpu, on_device = torch.zeros(1), torch.zeros(1, device="meta")

    assert formulas.settings_in_float32({"fused": True, "params": [on_device]})
    assert not formulas.settings_in_float32({"fused": True, "params": [on_cpu]})
    assert not formulas.settings_in_float32({"fused": None, "params": [on_device]})
    assert not formulas.settings_in_float32({"params": [on_device]})


def test_what_rounding_its_settings_makes_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert traindiff.check(one_step(tmp_path / "not", SHORT)).verdict == "unhealthy"  # in another kernel it is wrong
    on_a_device(monkeypatch)

    assert traindiff.check(one_step(tmp_path / "short", SHORT)).verdict == "healthy"
    assert traindiff.check(one_step(tmp_path / "wrong", 1.0 - 1e-3)).verdict == "unhealthy"


def test_it_is_noise_beside_another_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = one_step(tmp_path / "foreach", 1.0)
    on_a_device(monkeypatch)
    fused, wrong = one_step(tmp_path / "fused", SHORT), one_step(tmp_path / "wrong", 1.0 - 1e-3)

    content = json.loads((fused / "rank-00000" / "rank.json").read_text())
    assert content["optimizers"][0]["settings_in_float32"] is True
    assert traindiff.compare(one, fused).verdict == "equivalent"
    assert traindiff.compare(fused, one).verdict == "equivalent"
    assert traindiff.compare(one, wrong).verdict == "diverged"
