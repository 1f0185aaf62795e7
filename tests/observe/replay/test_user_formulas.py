"""Optimizers of users are replayed by the formulas that they declare: Lion, and Muon as nanochat writes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import traindiff.testing
from tests.observe.hooks.reading import rows, unobserved
from tests.observe.hooks.trainings import batches
from traindiff.observe.common.user_formulas import FORMULAS


class Lion(Optimizer):
    """Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, algorithm 2."""

    def __init__(self, parameters: Any, lr: float = 1e-3, weight_decay: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                momentum = state.setdefault("exp_avg", torch.zeros_like(parameter))
                direction = momentum.mul(beta1).add(parameter.grad, alpha=1 - beta1).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                momentum.lerp_(parameter.grad, 1 - beta2)


def lion(parameter: Any, gradient: Any, state: Any, settings: Any) -> Any:
    beta1, _ = settings["betas"]
    direction = torch.sign(beta1 * state.get("exp_avg", 0.0) + (1 - beta1) * gradient)
    return parameter * (1 - settings["lr"] * settings["weight_decay"]) - settings["lr"] * direction


class NanoMuon(Optimizer):
    """Muon as in nanochat: the learning rate is scaled by the shape, and the gradient is overwritten."""

    coefficients = 3.4445, -4.7750, 2.0315

    def __init__(self, parameters: Any, lr: float = 0.02) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": 0.95, "ns_steps": 5})
        for group in self.param_groups:
            group["zero_buffer"] = torch.zeros(7, 7)

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                buffer = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                update = self._orthogonal(parameter.grad.lerp_(buffer, group["momentum"]), group["ns_steps"])
                rows, columns = parameter.shape
                parameter.add_(update, alpha=-group["lr"] * max(1, rows / columns) ** 0.5)

    def _orthogonal(self, matrix: Tensor, steps: int) -> Tensor:
        a, b, c = self.coefficients
        is_tall = matrix.shape[0] > matrix.shape[1]
        x = matrix.bfloat16().mT if is_tall else matrix.bfloat16()
        x = x / (x.norm() + 1e-7)
        for _ in range(steps):
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        return x.mT if is_tall else x


def nano_muon(parameter: Any, gradient: Any, state: Any, settings: Any) -> Any:
    momentum = settings["momentum"]
    buffer = momentum * state.get("momentum_buffer", 0.0) + (1 - momentum) * gradient
    update = (1 - momentum) * gradient + momentum * buffer
    rows, columns = parameter.shape
    direction = traindiff.testing.newton_schulz(update, [(3.4445, -4.7750, 2.0315)] * settings["ns_steps"])
    return parameter - settings["lr"] * max(1, rows / columns) ** 0.5 * direction


@pytest.fixture(autouse=True)
def declared() -> Iterator[None]:
    before = dict(FORMULAS)
    yield
    FORMULAS.clear()
    FORMULAS.update(before)


def train(path: Path, kind: Callable[..., Optimizer], *, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    layers = nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False)
    model = nn.Sequential(*layers).to(dtype)
    optimizer = kind(model.parameters())
    with traindiff.record(path, model, optimizer, strict=True):
        for batch in batches(3):
            model(batch.to(dtype)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return traindiff.check(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "function", "whole"), [(Lion, lion, False), (NanoMuon, nano_muon, True)])
def test_an_optimizer_follows_its_declared_formula(
    kind: Any, function: Any, whole: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    assert traindiff.testing.formula(kind, whole=whole)(function) is function

    verdict = train(tmp_path / "run", kind, dtype=dtype)

    assert {one.kind for one in verdict.findings} <= {"lost-update"}, str(verdict)
    residuals = rows(tmp_path / "run", stage="residual")
    assert len(residuals) == 6
    assert {seen.slot for seen, _ in residuals} == {kind.__name__}
    assert max(max(-summary["minimum"], summary["maximum"]) for _, summary in residuals) <= 1.0


def test_a_lion_that_forgets_weight_decay_is_named(tmp_path: Path) -> None:
    class Forgetful(Lion):
        @torch.no_grad()
        def step(self, _closure: Any = None) -> None:  # type: ignore[override]
            decays = [group["weight_decay"] for group in self.param_groups]
            for group in self.param_groups:
                group["weight_decay"] = 0.0
            super().step()
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay

    traindiff.testing.formula(Forgetful)(lion)

    verdict = train(tmp_path / "run", Forgetful)

    assert verdict.findings[0].message.startswith("Forgetful moves 0.weight without its weight decay."), str(verdict)


def test_a_muon_with_other_coefficients_is_found(tmp_path: Path) -> None:
    class Cubic(NanoMuon):
        coefficients = 1.5, -0.5, 0.0

    traindiff.testing.formula(NanoMuon, whole=True)(nano_muon)

    verdict = train(tmp_path / "run", Cubic)

    assert (verdict.findings[0].kind, verdict.findings[0].path) == ("update-rule", "0.weight"), str(verdict)
    assert verdict.findings[0].message.startswith("NanoMuon moves 0.weight ")


def test_without_a_declaration_nothing_is_replayed(tmp_path: Path) -> None:
    verdict = train(tmp_path / "run", Lion)

    assert verdict.verdict == "healthy"
    assert ("optimizer", "Lion", "not replayed: no formula is known for Lion") in unobserved(tmp_path / "run")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda p, g, s, o: p - torch.erf(g), "a formula cannot use torch.erf, because its rounding is unknown"),
        (lambda p, g, s, o: p - g * s["missing"], "'missing'"),
        (lambda p, g, s, o: (p, g), "it returned a tuple instead of the parameter after the step"),
        (lambda p, g, s, o: p.mean(), "it returned a Rounded of shape () instead of the parameter after the step"),
    ],
)
def test_a_formula_that_cannot_be_computed_is_said_and_nothing_is_judged(
    function: Any, reason: str, tmp_path: Path
) -> None:
    traindiff.testing.formula(Lion)(function)

    verdict = train(tmp_path / "run", Lion)

    assert verdict.verdict == "healthy"
    assert any("the formula of Lion raised" in note and reason in note for note in verdict.notes), verdict.notes


def test_a_formula_of_no_class_is_refused() -> None:
    with pytest.raises(traindiff.ConfigError, match="is not a class of optimizers"):
        traindiff.testing.formula(nn.Linear(1, 1))  # type: ignore[arg-type]
