"""Formulas give what torch computes, and the bounds of their rounding hold for every implementation of torch."""

from __future__ import annotations

from functools import wraps
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import SGD, Adam, AdamW, Optimizer

import traindiff
from tests.observe.hooks.models import mlp
from tests.observe.hooks.reading import rows, unobserved
from tests.observe.hooks.trainings import batches
from traindiff.observe.torch.replay.copied_range import plain
from traindiff.observe.torch.replay.formulas import OF_TORCH, as_numbers, copied_settings, formula_of

Case = tuple[Any, dict[str, Any]]

SGDS: list[Case] = [
    (SGD, {"lr": 0.1, "momentum": momentum, "dampening": dampening, "nesterov": nesterov, "weight_decay": decay, **up})
    for momentum, dampening, nesterov, decay, up in product(
        (0.0, 0.9), (0.0, 0.3), (False, True), (0.0, 0.1), ({}, {"maximize": True})
    )
    if not nesterov or (momentum and not dampening)
]
ADAMS: list[Case] = [
    (kind, {"lr": 0.01, "amsgrad": amsgrad, "weight_decay": decay, "maximize": maximize, "betas": betas, "eps": eps})
    for kind, amsgrad, decay, maximize, (betas, eps) in product(
        (Adam, AdamW), (False, True), (0.0, 0.1), (False, True), (((0.9, 0.999), 1e-8), ((0.5, 0.9), 1e-3))
    )
]
OTHERS: list[Case] = [
    (kind, {**options, **up})
    for kind, options in (
        (optim.ASGD, {"lambd": 0.1, "weight_decay": 0.1, "t0": 2}),
        (optim.Rprop, {}),
        (optim.Rprop, {"etas": (0.4, 1.3), "step_sizes": (1e-3, 0.02)}),
        (optim.Adagrad, {}),
        (optim.Adagrad, {"weight_decay": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
        (optim.Adadelta, {"weight_decay": 0.1}),
        (optim.RMSprop, {}),
        (optim.RMSprop, {"weight_decay": 0.1, "momentum": 0.9, "centered": True}),
        (optim.Adamax, {"weight_decay": 0.1}),
        (optim.NAdam, {"weight_decay": 0.1}),
        (optim.NAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
        (optim.RAdam, {"weight_decay": 0.1, "betas": (0.9, 0.99)}),
        (optim.RAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
        (optim.Adafactor, {}),
        (optim.Adafactor, {"weight_decay": 0.1, "lr": 2.0, "eps": (1e-5, 1e-2), "d": 2.0}),
    )
    for up in ({}, {"maximize": True})
]
MUONS: list[Case] = [
    (optim.Muon, {}),
    (optim.Muon, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0}),
    (optim.Muon, {"ns_steps": 3, "lr": 0.1}),
]

HOW: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}, {"fused": True}, {"lr": torch.tensor(0.01)}]


def made(kind: Any, parameters: Any, **options: Any) -> Optimizer | None:
    """The optimizer; None if it has no such implementation."""
    try:
        found: Optimizer = kind(parameters, **options)
    except TypeError:
        return None
    return found


def test_every_optimizer_of_torch_has_a_formula_but_lbfgs() -> None:
    public = {
        one
        for one in vars(optim).values()
        if isinstance(one, type) and issubclass(one, Optimizer) and one is not Optimizer
    }

    assert public - set(OF_TORCH) == {optim.LBFGS}


@pytest.mark.parametrize("shape", [(40,), (5, 8), (2, 4, 5)])
@pytest.mark.parametrize(("kind", "options"), [*SGDS, *ADAMS, *OTHERS])
def test_the_formulas_are_those_of_torch_in_float64(kind: Any, options: dict[str, Any], shape: tuple[int, ...]) -> None:
    if len(shape) > 1 and kind is not optim.Adafactor:
        pytest.skip("elements do not depend on each other")
    torch.set_default_dtype(torch.float64)  # of numbers that optimizers keep
    try:
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(shape))
        optimizer = kind([parameter], **options)
        for _ in range(7):
            parameter.grad = torch.randn_like(parameter) * torch.logspace(-6, 2, 40).reshape(shape)
            state = {
                name: one.clone() if one.dim() else float(one)
                for name, one in optimizer.state.get(parameter, {}).items()
                if one is not None
            }
            known, before = formula_of(optimizer), parameter.detach().clone()
            assert known is not None
            settings = plain(
                as_numbers(copied_settings(known, optimizer, optimizer.param_groups[0]), float, short=False)
            )
            optimizer.step()

            after = known.formula.after(before, parameter.grad, state, settings)
            torch.testing.assert_close(after, parameter.detach(), rtol=1e-11, atol=1e-13)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize(("kind", "options"), [SGDS[-1], *ADAMS[::5], *OTHERS[::2], *MUONS])
def test_what_rounding_allows_is_never_exceeded_by_torch(
    kind: Any, options: dict[str, Any], how: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    if kind is SGD and how == {"fused": True} and dtype != torch.float32:
        pytest.skip("torch 2.13 on the CPU does not update; tests/analyse/rules/test_replay.py")
    if kind is optim.Muon and not options.get("nesterov", True) and dtype == torch.bfloat16:
        pytest.skip("torch 2.13 divides the momentum buffer itself by its norm, which is a finding: below")
    torch.manual_seed(0)
    model = mlp().to(dtype)
    parameters = [one for one in model.parameters() if one.dim() == 2] if kind is optim.Muon else model.parameters()
    optimizer = made(kind, parameters, **{**options, **how})
    if optimizer is None:
        pytest.skip("torch has no such implementation")
    with traindiff.record(tmp_path / "run", model, optimizer, observe="replay", strict=True):
        for batch in batches(3):
            model(batch.to(dtype)).square().mean().backward()
            optimizer.step()

    residuals = rows(tmp_path / "run", stage="residual")
    assert unobserved(tmp_path / "run") == []
    assert len(residuals) == 3 * len(optimizer.param_groups[0]["params"])
    assert max(max(-summary["minimum"], summary["maximum"]) for _, summary in residuals) <= 1.0
    assert not [seen.stage for seen, _ in rows(tmp_path / "run") if seen.stage.startswith(("variant", "state"))]


def test_a_buffer_that_muon_divides_in_place_is_found(tmp_path: Path) -> None:
    """Its iteration makes no copy of what is in bfloat16 already; without Nesterov that is the buffer itself."""
    torch.manual_seed(0)
    model = mlp().to(torch.bfloat16)
    optimizer = optim.Muon([one for one in model.parameters() if one.dim() == 2], nesterov=False)
    with traindiff.record(tmp_path / "run", model, optimizer, observe="replay", strict=True):
        for batch in batches(3):
            model(batch.to(torch.bfloat16)).square().mean().backward()
            optimizer.step()

    first = traindiff.check(tmp_path / "run").findings[0]
    assert (first.step, first.path, first.kind) == (0, "0.weight", "update-rule")
    assert "momentum_buffer" in first.message


@pytest.mark.parametrize("count", [1, 10, 1000, 100_000])
@pytest.mark.parametrize("kind", [Adam, AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.ASGD, optim.Adagrad])
def test_bounds_hold_late_in_a_training(kind: Any, count: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp()
    optimizer = kind(model.parameters())
    for batch in batches(1):
        model(batch).square().mean().backward()
        optimizer.step()
    for state in optimizer.state.values():
        state["step"].fill_(count)
    with traindiff.record(tmp_path / "run", model, optimizer, observe="replay", strict=True):
        for batch in batches(2):
            model(batch).square().mean().backward()
            optimizer.step()

    residuals = rows(tmp_path / "run", stage="residual")
    assert max(max(-summary["minimum"], summary["maximum"]) for _, summary in residuals) <= 1.0


def test_a_subclass_with_a_step_of_its_own_is_held_against_its_base() -> None:
    class Mine(AdamW):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            pass

    class Same(AdamW):
        pass

    class Unknown(Optimizer):
        pass

    parameters = [nn.Parameter(torch.ones(1))]
    known = [formula_of(kind(parameters)) for kind in (SGD, Adam, AdamW, Same, Mine)]
    assert [one and one.label for one in known] == ["SGD", "Adam", "AdamW", "AdamW", "Mine(AdamW)"]
    assert formula_of(Unknown(parameters, {})) is None


class Copying(AdamW):
    """Its step has all attributes of torch's, and is another one."""

    @wraps(AdamW.step)
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


class Preparing(AdamW):
    """Torch's step calls a method of it that changes gradients."""

    def _init_group(self, *arguments: Any) -> Any:
        return super()._init_group(*arguments)


@pytest.mark.parametrize("kind", [Copying, Preparing])
def test_a_class_has_a_step_of_its_own_if_it_replaces_any_part_of_it(kind: type[AdamW]) -> None:
    known = formula_of(kind([nn.Parameter(torch.ones(1))]))
    assert known is not None
    assert known.label == f"{kind.__name__}(AdamW)"


def test_a_wrapped_class_of_torch_has_a_step_of_its_own_and_a_scheduled_one_has_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @wraps(AdamW.step)
    def wrapped(*arguments: Any, **more: Any) -> Any:
        return step(*arguments, **more)

    optimizer, step = AdamW([nn.Parameter(torch.ones(1))]), AdamW.step
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    known = formula_of(optimizer)
    assert known is not None
    assert known.label == "AdamW"
    monkeypatch.setattr(AdamW, "step", wrapped)
    known = formula_of(optimizer)
    assert known is not None
    assert known.label == "AdamW(AdamW)"
