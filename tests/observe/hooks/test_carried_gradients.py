"""Gradients that nothing cleared since the optimizer read them: known exactly, in every dtype and under a scaler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import traindiff
from tests.observe.hooks.reading import rows

Clear = Callable[[nn.Module, Optimizer], Any]
PATHS = ["0.weight", "0.bias", "2.weight", "2.bias"]


def by_default(_: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad()


def in_place(_: nn.Module, optimizer: Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def all_at_once(model: nn.Module, _: Optimizer) -> None:
    if gradients := [parameter.grad for parameter in model.parameters() if parameter.grad is not None]:
        torch._foreach_zero_(gradients)


def through_data(model: nn.Module, _: Optimizer) -> None:
    """As old scripts do: no version counter moves."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.zero_()


def of_the_model(model: nn.Module, _: Optimizer) -> None:
    model.zero_grad()


def decayed(model: nn.Module, _: Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= 0.9


def nothing(_: nn.Module, __: Optimizer) -> None:
    pass


def the_first_layer(model: nn.Module, _: Optimizer) -> None:
    model.get_submodule("0").zero_grad()


def build(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 40), nn.GELU(), nn.Linear(40, 2)).to(dtype)


def batch(number: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(number)).to(dtype)


def train(
    path: Path, clear: Clear, *, first: bool = False, dtype: torch.dtype = torch.float32, scaled: bool = False,
    micro_steps: int = 1, clipped: bool = False, **settings: Any
) -> Path:  # fmt: skip
    """Four steps; gradients are cleared between the forward and the backward pass (`first`), or after the step."""
    model = build(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    with traindiff.record(path, model, optimizer, **settings):
        for step in range(4):
            for micro in range(micro_steps):
                loss = model(batch(4 * step + micro, dtype)).square().mean()
                if first and not micro:
                    clear(model, optimizer)
                scaler.scale(loss).backward()
            if clipped:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
            if not first:
                clear(model, optimizer)
    return path


def carried(path: Path) -> list[tuple[int, str]]:
    """Step and path of each carried gradient."""
    return [(seen.step, seen.path) for seen, _ in rows(path, phase="grad", stage="carried")]


SETUPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "scaled": {"scaled": True},
    "scaled-and-clipped": {"scaled": True, "clipped": True},
    "accumulated": {"micro_steps": 3},
    "accumulated-in-bfloat16": {"micro_steps": 3, "dtype": torch.bfloat16, "scaled": True},
}


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("clear", [by_default, in_place, all_at_once, through_data, of_the_model, decayed])
@pytest.mark.parametrize("setup", ["plain", "scaled-and-clipped", "accumulated-in-bfloat16"])
def test_gradients_that_are_cleared_in_any_way_or_scaled_down_are_not_carried(
    tmp_path: Path, clear: Clear, setup: str, *, first: bool
) -> None:
    path = train(tmp_path / "run", clear, first=first, **SETUPS[setup])
    assert carried(path) == []
    assert traindiff.check(path).verdict == "healthy"


@pytest.mark.parametrize("setup", SETUPS)
def test_gradients_that_are_never_cleared_are_named_by_check_and_by_compare(tmp_path: Path, setup: str) -> None:
    right, wrong = (train(tmp_path / name, clear, **SETUPS[setup]) for name, clear in
                    (("right", by_default), ("wrong", nothing)))  # fmt: skip
    assert carried(right) == []
    assert carried(wrong) == [(step, path) for step in (1, 2, 3) for path in PATHS]
    finding = next(one for one in traindiff.check(wrong).findings if one.kind == "carried-gradient")
    assert (finding.step, finding.path) == (1, "0.weight")
    assert finding.message == (
        "The backward pass of step 1 added to gradients that step 0 had used, because nothing had cleared them "
        "(0.weight, 0.bias, 2.weight and 1 more parameter, 4 of 4 gradients). Was zero_grad() left out?"
    )
    found = traindiff.compare(right, wrong)
    assert found.verdict == "diverged"
    first = found.first_divergence
    assert first is not None
    assert (first.step, first.phase, first.path) == (1, "grad", "0.weight")
    assert first.kind in ("carried-gradient", "accumulated")
    assert "zero_grad() left out" in first.message
    assert not [one for one in found.findings if one.step == 1 and one.path == "0.weight" and one is not first]


def test_a_layer_whose_gradients_alone_are_not_cleared_is_named(tmp_path: Path) -> None:
    wrong = train(tmp_path / "run", the_first_layer, scaled=True)
    assert {path for _, path in carried(wrong)} == {"2.weight", "2.bias"}
    (message,) = [one.message for one in traindiff.check(wrong).findings if one.kind == "carried-gradient"]
    assert "2.weight, 2.bias, 2 of 4 gradients" in message


@pytest.mark.parametrize("settings", [{"every": 2}, {"steps": "2-"}])
def test_gradients_are_known_to_be_carried_if_the_step_before_was_not_recorded(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    wrong = train(tmp_path / "wrong", nothing, scaled=True, **settings)
    assert next(step for step, path in carried(wrong) if path == "2.bias") == 2
    assert carried(train(tmp_path / "right", by_default, scaled=True, **settings)) == []


def test_what_both_runs_carry_does_not_tell_them_apart(tmp_path: Path) -> None:
    one, two = (train(tmp_path / name, nothing) for name in ("one", "two"))
    found = traindiff.compare(one, two)
    assert found.verdict == "identical"


def test_a_gradient_that_is_filled_by_hand_is_not_carried(tmp_path: Path) -> None:
    for name, fill in (("copy", Tensor.copy_), ("data", lambda held, new: held.data.copy_(new))):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with traindiff.record(tmp_path / name, model, optimizer):
            for step in range(3):
                found = torch.autograd.grad(model(batch(step)).square().mean(), list(model.parameters()))
                inputs = batch(step).requires_grad_()
                model(inputs).sum().backward(inputs=[inputs])
                for parameter, gradient in zip(model.parameters(), found, strict=True):
                    parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    fill(parameter.grad, gradient)
                optimizer.step()
        assert carried(tmp_path / name) == []
        assert traindiff.check(tmp_path / name).verdict == "healthy"


def test_two_optimizers_that_take_turns_on_the_same_parameters(tmp_path: Path) -> None:
    model = build()
    optimizers = {"a": torch.optim.SGD(model.parameters(), lr=0.1), "b": torch.optim.Adam(model.parameters())}
    with traindiff.record(tmp_path / "run", model, optimizers):
        for step in range(4):
            model.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizers["ab"[step % 2]].step()
    assert carried(tmp_path / "run") == []
    assert [one.message for one in traindiff.check(tmp_path / "run").findings] == []


def adversaries(path: Path, *, clears: Callable[[str], bool]) -> Path:
    """A generator and a discriminator; the generator's pass leaves gradients in the discriminator."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"make": nn.Linear(6, 6), "judge": nn.Linear(6, 1)})
    making = torch.optim.Adam(model["make"].parameters(), lr=1e-3)
    judging = torch.optim.Adam(model["judge"].parameters(), lr=1e-3)
    with traindiff.record(path, model, {"making": making, "judging": judging}):
        for step in range(3):
            if clears("judging"):
                judging.zero_grad()
            (model["judge"](batch(step)) - model["judge"](model["make"](batch(step)).detach())).mean().backward()
            judging.step()
            if clears("making"):
                making.zero_grad()
            (-model["judge"](model["make"](batch(step)))).mean().backward()
            making.step()
    return path


def test_what_another_optimizers_pass_leaves_is_no_finding_if_it_is_cleared_in_time(tmp_path: Path) -> None:
    assert carried(adversaries(tmp_path / "right", clears=lambda name: True)) == []
    wrong = adversaries(tmp_path / "wrong", clears=lambda name: name == "judging")
    assert {path for _, path in carried(wrong)} == {"make.weight", "make.bias"}
    wrong = adversaries(tmp_path / "other", clears=lambda name: name == "making")
    assert {path for _, path in carried(wrong)} == {"judge.weight", "judge.bias"}


@pytest.mark.parametrize(("clears", "takes_away"), [(True, False), (False, False), (False, True)])
def test_evaluations_in_a_closure_are_cleared_or_not(tmp_path: Path, *, clears: bool, takes_away: bool) -> None:
    model = build()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    with traindiff.record(tmp_path / "run", model, optimizer):
        for step in range(3):

            def closure(step: int = step) -> Tensor:
                if clears:
                    optimizer.zero_grad()
                before = [None if one.grad is None else one.grad.clone() for one in model.parameters()]
                loss: Tensor = model(batch(step)).square().mean()
                loss.backward()
                for parameter, gradient in zip(model.parameters(), before, strict=True):
                    if takes_away and gradient is not None and parameter.grad is not None:
                        parameter.grad -= gradient
                return loss

            optimizer.step(closure)
    is_carried = not (clears or takes_away)
    assert bool(carried(tmp_path / "run")) is is_carried
    assert bool(traindiff.check(tmp_path / "run", rules="carried-gradient").findings) is is_carried


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_sparse_gradients_and_gradients_with_a_graph(tmp_path: Path) -> None:
    for clears in (True, False):
        model = nn.EmbeddingBag(11, 4, sparse=True)
        optimizer: Optimizer = torch.optim.SparseAdam(model.parameters())
        with traindiff.record(tmp_path / f"sparse-{clears}", model, optimizer):
            for _ in range(3):
                model(torch.arange(6).view(2, 3)).square().mean().backward()
                optimizer.step()
                if clears:
                    optimizer.zero_grad()
        assert bool(carried(tmp_path / f"sparse-{clears}")) is not clears

        dense = build()
        optimizer = torch.optim.SGD(dense.parameters(), lr=0.1)
        with traindiff.record(tmp_path / f"graph-{clears}", dense, optimizer):
            for step in range(3):
                dense(batch(step)).square().mean().backward(create_graph=True)
                optimizer.step()
                if clears:
                    for parameter in dense.parameters():
                        parameter.grad = None
        assert bool(carried(tmp_path / f"graph-{clears}")) is not clears


def test_steps_inside_the_backward_pass_clear_their_gradients(tmp_path: Path) -> None:
    model = build()
    optimizers = {
        name.replace(".", "_"): torch.optim.SGD([parameter], lr=0.1) for name, parameter in model.named_parameters()
    }
    for name, parameter in model.named_parameters():

        def step(_: Tensor, name: str = name.replace(".", "_")) -> None:
            optimizers[name].step()
            optimizers[name].zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    with traindiff.record(tmp_path / "run", model, optimizers):
        for number in range(3):
            model(batch(number)).square().mean().backward()
    assert carried(tmp_path / "run") == []
