"""Layers that a training unfreezes: where a run begins or ends elsewhere, it tells nothing of what was compared."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import traindiff

UNFREEZES = 3


def trained(
    path: Path, steps: range = range(6), *, unfreezes: int = UNFREEZES, saved: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Record a training, and return what its step 4 begins with."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    model[:3].requires_grad_(steps[0] >= unfreezes)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    parts = {"model": model, "optimizer": optimizer}
    for name, one in parts.items() if saved else ():
        one.load_state_dict(deepcopy(saved[name]))
    found: dict[str, Any] = {}
    with traindiff.record(path, model, optimizer):
        for step in steps:
            if step == UNFREEZES + 1:
                found = deepcopy({name: one.state_dict() for name, one in parts.items()})
            if step == unfreezes:
                model[:3].requires_grad_(True)
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            cross_entropy(model(x), x[:, :4].argmax(-1)).backward()
            optimizer.step()
    return found


def noted(baseline: Path, candidate: Path) -> tuple[str, str]:
    comparison = traindiff.compare(baseline, candidate)
    return comparison.verdict, " ".join(comparison.notes)


def test_a_run_that_goes_on_after_its_layers_were_unfrozen_is_not_said_to_differ(tmp_path: Path) -> None:
    saved = trained(tmp_path / "whole")
    trained(tmp_path / "rest", range(UNFREEZES + 1, 6), saved=saved)

    verdict, notes = noted(tmp_path / "whole", tmp_path / "rest")

    assert verdict == "identical"
    assert "begins with the parameters of the baseline's step 4" in notes
    assert "Settings differ" not in notes


def test_a_run_that_ends_before_its_layers_are_unfrozen_is_not_said_to_differ(tmp_path: Path) -> None:
    trained(tmp_path / "whole")
    trained(tmp_path / "short", range(2))

    assert "Settings differ" not in noted(tmp_path / "whole", tmp_path / "short")[1]


def test_layers_that_stay_frozen_in_one_run_are_named(tmp_path: Path) -> None:
    saved = trained(tmp_path / "whole")
    trained(tmp_path / "never", unfreezes=9)
    trained(tmp_path / "rest", range(UNFREEZES + 1, 6), unfreezes=9, saved=saved)

    for name in ("never", "rest"):
        verdict, notes = noted(tmp_path / "whole", tmp_path / name)
        assert verdict == "diverged"
        assert "0.weight: it is frozen in the candidate" in notes
    first = traindiff.compare(tmp_path / "whole", tmp_path / "rest").first_divergence
    assert first is not None
    assert "it is frozen in the candidate" in first.message
