"""Directions of recordings of real trainings: what `traindiff compare` says of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import traindiff
from tests.cli.test_json_schemas import assert_fits

Gradients = dict[tuple[int, str], torch.Tensor]


def train(
    path: Path, edit: Callable[[int, nn.Module], None] = lambda step, model: None, *, steps: int = 4, **settings: Any
) -> Gradients:
    """Four steps of a small network; `edit` may change its gradients. Returns these."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: Gradients = {}
    with traindiff.record(path, model, optimizer, strict=True, detail="signs", **settings):
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.randn(5, 8)).square().mean().backward()
            edit(step, model)
            for name, one in model.named_parameters():
                if one.grad is not None:
                    found[step, name] = one.grad.clone()
            optimizer.step()
    return found


def flipped(step: int, model: nn.Module) -> None:
    """In step 2, the gradient of one weight has the other sign."""
    if step == 2:
        model[0].weight.grad.neg_()  # type: ignore[index,union-attr,operator]


def test_similarities_are_those_of_the_gradients(tmp_path: Path) -> None:
    baseline = train(tmp_path / "baseline")
    candidate = train(tmp_path / "candidate", flipped)
    found = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate").directions

    assert found is not None
    assert found.steps == (0, 1, 2, 3)
    assert set(found.parameters) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for path, row in found.parameters.items():
        for step, one in zip(found.steps, row, strict=True):
            assert one is not None
            agree = baseline[step, path].sign() == candidate[step, path].sign()
            assert (one.same, one.count) == (int(agree.sum()), agree.numel())


def test_the_step_and_the_parameter_that_break_the_rule_are_named(tmp_path: Path) -> None:
    train(tmp_path / "baseline")
    train(tmp_path / "candidate", flipped)
    comparison = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate")

    (note,) = [note for note in comparison.notes if "broken in step 2" in note]
    assert "0.weight (" in note
    assert "after 1.0000" in note
    assert any("the verdict does not rest on it" in note for note in comparison.notes)
    assert {finding.kind for finding in comparison.findings} <= {
        "sign",
        "value",
        "scale",
        "zero",
        "localized",
        "offset",
    }
    assert_fits(comparison.to_json(), "comparison")


def test_the_rule_alone_makes_no_verdict(tmp_path: Path) -> None:
    """Elements near zero turn around by rounding: a correct run in which many are broke the rule."""

    def near_zero(size: float) -> Callable[[int, nn.Module], None]:
        def edit(_step: int, model: nn.Module) -> None:
            gradient = model[0].weight.grad  # type: ignore[index,union-attr]
            gradient.view(-1)[1:] = size  # type: ignore[operator,union-attr]
            gradient.view(-1)[0] = 1.0  # type: ignore[operator,union-attr]

        return edit

    train(tmp_path / "baseline", near_zero(1e-9), steps=1)
    train(tmp_path / "candidate", near_zero(-1e-9), steps=1)
    comparison = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate")

    assert comparison.verdict == "equivalent"
    assert comparison.directions is not None
    assert [one.parameter for one in comparison.directions.broken] == ["0.weight", None]


def test_without_signs_nothing_is_said_of_directions(tmp_path: Path) -> None:
    train(tmp_path / "baseline")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 3))
    with traindiff.record(tmp_path / "candidate", model, strict=True):
        model(torch.randn(5, 8)).square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    comparison = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate")

    assert comparison.directions is None
    assert not [note for note in comparison.notes if "irections" in note]


def test_a_parameter_of_one_run_is_named_and_the_rest_compared(tmp_path: Path) -> None:
    def dropped(_step: int, model: nn.Module) -> None:
        model[2].bias.grad = None  # type: ignore[index,union-attr]

    train(tmp_path / "baseline")
    train(tmp_path / "candidate", dropped)
    comparison = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate")

    assert comparison.directions is not None
    assert comparison.directions.only == (("2.bias",), ())
    assert len(comparison.directions.parameters) == 3
    assert "Directions only in the baseline: 2.bias." in comparison.notes


def test_renamed_parameters_and_chosen_steps_are_compared(tmp_path: Path) -> None:
    train(tmp_path / "baseline")
    train(tmp_path / "candidate")
    found = traindiff.compare(
        tmp_path / "baseline", tmp_path / "candidate", rename={"^0": "first"}, steps="1-2"
    ).directions

    assert found is not None
    assert found.steps == (1, 2)
    assert found.only == (("0.weight", "0.bias"), ("first.weight", "first.bias"))
