"""Steps of LBFGS are replayed from its history and its latest gradient; what it does wrong is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import LBFGS

import traindiff
from tests.analyse.rules.test_replay import findings
from tests.faulty_step import at_end_of_step
from tests.observe.hooks.models import mlp
from tests.observe.hooks.reading import rows, unobserved
from tests.observe.hooks.trainings import batches

Change = Callable[[list[Tensor], list[Tensor], LBFGS], None]
"""Is given the parameters, what they were before the step, and the optimizer."""


def train(path: Path, change: Change | None = None, *, dtype: torch.dtype = torch.float32, **settings: Any) -> None:
    torch.manual_seed(0)
    model = mlp().to(dtype)
    optimizer = LBFGS(model.parameters(), **settings)
    held, before = list(model.parameters()), []
    optimizer.register_step_pre_hook(lambda *_: before.extend(one.detach().clone() for one in held))

    def after(*_: object) -> None:
        if change is not None:
            with torch.no_grad():
                change(held, before, optimizer)
        before.clear()

    at_end_of_step(optimizer, after)
    (batch,) = batches(1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(batch.to(dtype)) - 1.0).square().mean()
        loss.backward()
        return loss

    with traindiff.record(path, model, optimizer, observe=("replay", "param", "optimizer"), strict=True):
        for _ in range(3):
            optimizer.step(closure)


SETTINGS: list[dict[str, Any]] = [
    {"max_iter": 1},
    {"max_iter": 4, "lr": 0.1},
    {"max_iter": 3, "history_size": 3, "lr": 0.3},
    {"max_iter": 4, "lr": 0.01, "line_search_fn": "strong_wolfe"},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_what_rounding_allows_is_not_exceeded_by_torch(
    settings: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    train(tmp_path / "run", dtype=dtype, **settings)

    residuals = rows(tmp_path / "run", stage="residual")
    assert len(residuals) == 3 * 4
    assert max(max(-summary["minimum"], summary["maximum"]) for _, summary in residuals) <= 1.0
    assert {summary["zero"] for seen, summary in rows(tmp_path / "run", stage="replayed") if seen.path == "2.bias"} == {
        0
    }
    assert findings(tmp_path / "run") == []
    assert unobserved(tmp_path / "run") == []


def reverse(held: list[Tensor], before: list[Tensor], _: LBFGS) -> None:
    for parameter, old in zip(held, before, strict=True):
        parameter.copy_(2.0 * old - parameter)


def without_history(held: list[Tensor], before: list[Tensor], optimizer: LBFGS) -> None:
    gradient = optimizer.state[held[0]]["prev_flat_grad"].split([one.numel() for one in held])
    for parameter, old, one in zip(held, before, gradient, strict=True):
        parameter.copy_(old - optimizer.param_groups[0]["lr"] * one.view_as(old))


def without_scale(held: list[Tensor], before: list[Tensor], optimizer: LBFGS) -> None:
    """With one pair in the history, the direction is (1 - s yᵀ / (yᵀ s)) (1 - y sᵀ / (yᵀ s)) g + s sᵀ g / (yᵀ s)."""
    state = optimizer.state[held[0]]
    if not state["old_stps"]:
        return
    (y,), (s,), q = state["old_dirs"], state["old_stps"], -state["prev_flat_grad"]
    share = s.dot(q) / y.dot(s)
    r = q - share * y
    r = r + s * (share - y.dot(r) / y.dot(s))
    for parameter, old, one in zip(held, before, r.split([one.numel() for one in held]), strict=True):
        parameter.copy_(old + optimizer.param_groups[0]["lr"] * one.view_as(old))


def half(held: list[Tensor], before: list[Tensor], _: LBFGS) -> None:
    for parameter, old in zip(held, before, strict=True):
        parameter.copy_(old + 0.5 * (parameter - old))


def disturb(held: list[Tensor], _before: list[Tensor], _: LBFGS) -> None:
    held[2][1, 3] += 0.01


def put_back(held: list[Tensor], before: list[Tensor], _: LBFGS) -> None:
    held[2].copy_(before[2])


@pytest.mark.parametrize(
    ("change", "step", "path", "says"),
    [
        (reverse, 0, "0.weight", "as if the learning rate were -1 x what it is"),
        (without_history, 1, "0.weight", "as if it kept no history: along the gradient"),
        (without_scale, 1, "0.weight", "as if the inverse Hessian began at 1, not at the scale of the latest step"),
        (half, 1, "0.weight", "as if the learning rate were 0.5 x what it is"),
        (disturb, 0, "2.weight", "by something else than its settings ask for"),
        (put_back, 0, "2.weight", ""),
    ],
)
def test_a_mistake_is_found(change: Change, step: int, path: str, says: str, tmp_path: Path) -> None:
    train(tmp_path / "run", change, max_iter=1, lr=0.5, history_size=1)

    found = [one for one in findings(tmp_path / "run") if one.step == step and one.phase == "update"]
    assert found[0].path == path
    assert found[0].message.startswith(f"LBFGS moves {path} {says}" if says else f"LBFGS never moves {path}")


def test_an_iteration_that_the_history_leaves_out_is_said_and_no_finding(tmp_path: Path) -> None:
    train(tmp_path / "run", max_iter=30, history_size=4)

    assert {reason for _, _, reason in unobserved(tmp_path / "run")} == {
        "not replayed: its history leaves out an iteration of this step"
    }
    assert findings(tmp_path / "run") == []
