"""What is done to gradients between the backward pass and the optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import traindiff
from tests.observe.hooks.models import mlp
from tests.observe.hooks.reading import rows
from traindiff.core.observation import ALL_GRADIENTS

STAGES = ("grad", "grad.stages")


def one_step(path: Path, clip: Any, *, scaler: torch.amp.GradScaler | None = None, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    with traindiff.record(path, model, optimizer, strict=True, **settings):
        scaler.scale(model(torch.ones(4, 8)).square().sum()).backward()
        scaler.unscale_(optimizer)
        clip(model)
        scaler.step(optimizer)
    return model


def stages(path: Path) -> list[tuple[str, str]]:
    """Stages and slots of phase `grad`, in the order in which they come."""
    return list(dict.fromkeys((seen.stage, seen.slot) for seen, _ in rows(path, phase="grad")))


def to_one(model: nn.Module) -> None:
    clip_grad_norm_(model.parameters(), 1.0)  # a generator; imported before the tap was attached


def test_a_call_that_clips_leaves_its_norm_and_its_limit(tmp_path: Path) -> None:
    one_step(tmp_path / "run", to_one)

    found = {seen.slot: float(summary["sum"]) for seen, summary in rows(tmp_path / "run", stage="clipped")}
    assert found["max_norm"] == 1.0
    assert found["norm"] > 1.0
    assert {seen.path for seen, _ in rows(tmp_path / "run", stage="clipped")} == {ALL_GRADIENTS}
    assert stages(tmp_path / "run") == [("clipped", "norm"), ("clipped", "max_norm"), ("", "grad")]


def test_gradients_before_clipping_are_recorded_if_asked_for(tmp_path: Path) -> None:
    one_step(tmp_path / "run", to_one, observe=STAGES)

    before = rows(tmp_path / "run", phase="grad", stage="reduced")
    after = rows(tmp_path / "run", phase="grad", stage="", slot="grad")
    norm = float(rows(tmp_path / "run", stage="clipped", slot="norm")[0][1]["sum"])
    assert [seen.path for seen, _ in before] == [seen.path for seen, _ in after]
    for (_, full), (_, clipped) in zip(before, after, strict=True):
        assert clipped["sum"] == pytest.approx(full["sum"] / norm, rel=1e-4)


def test_gradients_before_unscaling_are_scaled(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    one_step(tmp_path / "run", to_one, scaler=scaler, observe=(*STAGES, "loss"))

    assert stages(tmp_path / "run")[:2] == [("reduced", "grad"), ("unscaled", "grad")]
    scaled = {seen.stage: seen.scaled for seen, _ in rows(tmp_path / "run", phase="grad", slot="grad")}
    assert scaled == {"reduced": True, "unscaled": False, "": False}
    ((seen, scale),) = rows(tmp_path / "run", phase="loss", path="loss_scale")
    assert scale["sum"] == 64.0
    assert not seen.scaled


def test_without_anything_between_there_are_no_stages(tmp_path: Path) -> None:
    one_step(tmp_path / "run", lambda model: None, observe=STAGES)

    assert stages(tmp_path / "run") == [("", "grad")]


@pytest.mark.parametrize("clip", [lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)])
def test_clipping_of_elements_leaves_its_limit(clip: Any, tmp_path: Path) -> None:
    one_step(tmp_path / "run", clip)

    assert stages(tmp_path / "run") == [("clipped", "max_value"), ("", "grad")]


def test_clipping_of_another_model_is_none_of_this_run(tmp_path: Path) -> None:
    other = mlp()
    other(torch.ones(4, 8)).sum().backward()

    one_step(tmp_path / "run", lambda model: clip_grad_norm_(other.parameters(), 1.0), observe=STAGES)

    assert stages(tmp_path / "run") == [("", "grad")]


def test_the_functions_are_put_back(tmp_path: Path) -> None:
    utils = torch.nn.utils
    before = {name: value for name, value in vars(utils).items() if "clip" in name}
    inside = {name: value for name, value in vars(utils.clip_grad).items() if "clip" in name}
    scaler = {name: vars(torch.amp.GradScaler)[name] for name in ("scale", "unscale_", "step")}

    one_step(tmp_path / "run", to_one)

    assert {name: vars(utils)[name] for name in before} == before
    assert {name: vars(utils.clip_grad)[name] for name in inside} == inside
    assert {name: vars(torch.amp.GradScaler)[name] for name in scaler} == scaler
    assert clip_grad_value_ is utils.clip_grad_value_


def test_training_is_the_same_with_and_without_it(tmp_path: Path) -> None:
    recorded = one_step(tmp_path / "run", to_one, observe=STAGES)
    plain = one_step(tmp_path / "none", to_one, observe="batch")

    for one, other in zip(recorded.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_stages_may_be_recorded_without_what_the_optimizer_sees(tmp_path: Path) -> None:
    one_step(tmp_path / "run", to_one, observe="grad.stages")

    assert stages(tmp_path / "run") == [("reduced", "grad"), ("clipped", "norm"), ("clipped", "max_norm")]
