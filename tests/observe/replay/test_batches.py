"""Replaying several parameters together gives what replaying each alone gives, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import traindiff
from tests.faulty_step import at_end_of_step
from tests.observe.hooks.reading import rows
from traindiff.observe.torch.replay import batches as batches_module
from traindiff.observe.torch.replay.batches import Batch

OPTIMIZERS = [
    ("SGD", {"momentum": 0.9}), ("ASGD", {}), ("Rprop", {}), ("Adagrad", {}), ("Adadelta", {}), ("RMSprop", {}),
    ("Adam", {"amsgrad": True}), ("AdamW", {}), ("AdamW", {"fused": True}), ("Adamax", {}), ("NAdam", {}),
    ("RAdam", {}), ("Adafactor", {}),
]  # fmt: skip


def recorded(path: Path, kind: str, options: dict[str, Any], *, fault: str = "") -> list[tuple[Any, ...]]:
    """What is replayed of a training with two groups and two dtypes, one of whose parameters joins a step later.

    With `fault`, that state of a parameter is wrong after each step.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 4), nn.Linear(4, 3))
    model[2].to(torch.bfloat16)
    groups = [
        {"params": [one for one in model.parameters() if one.dim() > 1]},
        {"params": [one for one in model.parameters() if one.dim() == 1], "lr": 0.02},
    ]
    make: Any = getattr(torch.optim, kind)
    optimizer: Optimizer = make(groups, **options)
    if fault:
        at_end_of_step(optimizer, lambda *_: optimizer.state[model[1].weight][fault].mul_(1.5))
    with traindiff.record(path, model, optimizer, observe="replay", strict=True):
        for step in range(3):
            hidden = model[2](model[1](model[0](torch.randn(7, 6))).bfloat16()).float()
            (model[3](hidden) if step else hidden).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [(seen.step, seen.path, seen.stage, bytes(summary)) for seen, summary in rows(path)]


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many ranges each batch has had so far."""
    found: list[int] = []

    def joined(of: Any) -> Batch:
        found.append(len(of))
        return original(of)

    original = batches_module._joined
    monkeypatch.setattr(batches_module, "_joined", joined)
    return found


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_each_parameter_alone_is_replayed_alike(
    kind: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    together = recorded(tmp_path / "together", kind, options)
    assert max(sizes) == (1 if kind == "Adafactor" else 3), "Adafactor needs whole parameters"
    sizes.clear()
    monkeypatch.setattr(batches_module, "MOST_ELEMENTS", 0)
    alone = recorded(tmp_path / "alone", kind, options)

    assert max(sizes) == 1
    assert {path for _, path, stage, _ in alone if stage == "residual"} >= {"0.weight", "1.bias", "2.weight", "3.bias"}
    assert together == alone


@pytest.mark.parametrize(("kind", "state"), [("AdamW", "exp_avg"), ("Adagrad", "sum"), ("SGD", "momentum_buffer")])
def test_in_a_batch_the_parameter_and_the_state_that_are_wrong_are_named(
    kind: str, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    options = {"momentum": 0.9} if kind == "SGD" else {}
    together = recorded(tmp_path / "together", kind, options, fault=state)
    assert max(sizes) == 3
    monkeypatch.setattr(batches_module, "MOST_ELEMENTS", 0)

    assert together == recorded(tmp_path / "alone", kind, options, fault=state)
    assert {(path, stage) for _, path, stage, _ in together if stage == f"state[{state}]"} == {
        ("1.weight", f"state[{state}]")
    }
