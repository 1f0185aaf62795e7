"""Gradients that vanish, explode, do not arrive, or are lost to their dtype."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import traindiff
from tests.analyse.rules.small_trainings import classifier, found, kinds, points, train
from traindiff.analyse.findings import Finding


def test_gradients_that_vanish_behind_many_sigmoids_are_found_in_the_first_layers(tmp_path: Path) -> None:
    model = classifier(nn.Sigmoid, depth=14)
    verdict = traindiff.check(train(tmp_path / "run", model, SGD(model.parameters(), lr=0.1), steps=12))

    finding = found(verdict, "vanishing-gradients")
    assert verdict.verdict == "unhealthy"
    assert (finding.step, finding.phase, finding.path) == (0, "grad", "0.weight")
    assert finding.evidence["largest_at"] == "28.weight"
    assert finding.evidence["size"] < 1e-9 * finding.evidence["largest"]
    assert finding.evidence["num_steps"] == 12
    assert "The gradient of 0.weight vanishes" in finding.message


class Chaotic(nn.Module):
    """A recurrence whose state stays bounded, and whose derivative grows with every position."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(20, 20, bias=False)
        self.head = nn.Linear(20, 4)
        with torch.no_grad():
            self.step.weight.copy_(6.0 * torch.linalg.qr(torch.randn(20, 20))[0])

    def forward(self, x: Tensor) -> Tensor:
        hidden = x
        for _ in range(16):
            hidden = torch.sin(self.step(hidden))
        return self.head(hidden)  # type: ignore[no-any-return]


def test_gradients_that_explode_in_a_recurrence_are_found(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Chaotic()
    verdict = traindiff.check(train(tmp_path / "run", model, SGD(model.parameters(), lr=1e-9), steps=4))

    finding = found(verdict, "exploding-gradients")
    assert (finding.step, finding.path, finding.evidence["last_at"]) == (0, "step.weight", "head.weight")
    assert finding.evidence["size"] > 1e5 * finding.evidence["last"]
    assert "the layer nearest the loss" in finding.message


def test_clipping_does_not_hide_gradients_that_explode(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Chaotic()
    run = train(tmp_path / "run", model, SGD(model.parameters(), lr=1e-9), steps=4, clip=1.0)

    assert found(traindiff.check(run), "exploding-gradients").path == "step.weight"


class WithMinorLoss(nn.Module):
    """What it returns last counts next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.minor = nn.Linear(20, 32), nn.Linear(32, 4), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        result: Tensor = self.second(hidden) + 1e-7 * self.minor(hidden)
        return result


def test_a_last_layer_that_counts_little_does_not_make_the_others_explode(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = WithMinorLoss()
    run = train(tmp_path / "run", model, SGD(model.parameters(), lr=0.1), steps=12)

    assert kinds(traindiff.check(run)) == set()


class Detached(nn.Module):
    """A second layer that the loss does not see, and a third that is multiplied by 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(20, 4), nn.Linear(20, 4), nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.first(x) + self.second(x).detach() + 0.0 * self.third(x)
        return result


def test_parameters_that_get_no_gradient_are_a_warning(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Detached()
    verdict = traindiff.check(train(tmp_path / "run", model, SGD(model.parameters(), lr=0.1), steps=6))

    assert verdict.verdict == "healthy"
    assert {one.path for one in verdict.warnings} == {"second.weight", "second.bias", "third.weight", "third.bias"}
    none = next(one for one in verdict.warnings if one.path == "second.weight")
    zero = next(one for one in verdict.warnings if one.path == "third.weight")
    assert (none.kind, none.evidence["none"], none.evidence["zero"]) == ("no-gradient", 6, 0)
    assert (zero.kind, zero.evidence["none"], zero.evidence["zero"]) == ("no-gradient", 0, 6)
    assert "it is None in all of 6 steps" in none.message
    assert "it is 0 in every element in 6 of 6 steps. Look for" in zero.message


class DetachedLater(nn.Module):
    """Two layers, of which the second is used in some steps only; the pass tells by its call."""

    def __init__(self, used: Callable[[int], float | None]) -> None:
        super().__init__()
        self.first, self.second, self.used, self.step = nn.Linear(20, 4), nn.Linear(20, 4), used, -1

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        factor, second = self.used(self.step), self.second(x)
        result: Tensor = self.first(x) + (second.detach() if factor is None else factor * second)
        return result


def warned(path: Path, used: Callable[[int], float | None], steps: int) -> list[Finding]:
    torch.manual_seed(0)
    model = DetachedLater(used)
    verdict = traindiff.check(train(path, model, SGD(model.parameters(), lr=0.1), steps=steps), rules="no-gradient")
    return [*verdict.findings, *verdict.warnings]


@pytest.mark.parametrize(("after", "what"), [(None, "None in all of 7 steps"), (0.0, "0 in every element in 7 of 7")])
def test_a_gradient_that_ends_in_the_middle_of_a_run_is_a_warning(
    tmp_path: Path, after: float | None, what: str
) -> None:
    weight, bias = warned(tmp_path / "run", lambda step: 1.0 if step < 6 else after, steps=13)

    assert [(one.kind, one.step, one.path) for one in (weight, bias)] == [
        ("no-gradient", 6, "second.weight"), ("no-gradient", 6, "second.bias"),
    ]  # fmt: skip
    assert weight.message.startswith(f"second.weight gets no gradient from step 6 on: it is {what}")
    assert "Its latest gradient is that of step 5." in weight.message


PAUSES: dict[str, tuple[Callable[[int], float | None], int]] = {
    "every sixth step": (lambda step: 1.0 if step % 6 == 0 else None, 36),
    "half of the time": (lambda step: 1.0 if step // 6 % 2 == 0 else None, 24),
    "a pause as long before": (lambda step: None if 8 <= step < 12 or step >= 20 else 1.0, 28),
    "used once": (lambda step: 1.0 if step == 0 else None, 12),
    "the last steps": (lambda step: 1.0 if step < 12 else None, 16),
}


@pytest.mark.parametrize("name", PAUSES)
def test_a_parameter_that_is_used_now_and_then_rests_without_a_warning(tmp_path: Path, name: str) -> None:
    used, steps = PAUSES[name]
    assert warned(tmp_path / "run", used, steps) == []


def test_a_layer_that_is_frozen_in_the_middle_of_a_run_and_a_loss_that_is_minimal(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = classifier(nn.ReLU, depth=2)
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer):
        for step in range(20):
            model[0].requires_grad_(step < 8)
            optimizer.zero_grad()
            (model(torch.randn(8, 20)).square().mean() * (0.0 if step >= 14 else 1.0)).backward()
            optimizer.step()

    assert traindiff.check(tmp_path / "run", rules="no-gradient").warnings == ()


def test_a_gradient_of_one_number_whose_terms_cancel_has_arrived(tmp_path: Path) -> None:
    """The last bias of a critic that is trained by the difference of two means."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer):
        for _ in range(6):
            optimizer.zero_grad()
            (model(torch.randn(16, 8)).mean() - model(torch.randn(16, 8) + 1.0).mean()).backward()
            optimizer.step()

    assert kinds(traindiff.check(tmp_path / "run")) == set()


def test_a_gradient_of_one_number_that_is_zero_is_a_warning_also_if_gradients_of_outputs_are_not_recorded(
    tmp_path: Path,
) -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 4)
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.0 * self.scale

    torch.manual_seed(0)
    model = Scaled()
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, observe=("loss", "grad", "param")):
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()

    assert found(traindiff.check(tmp_path / "run"), "no-gradient").path == "scale"


def test_a_head_of_zeros_lets_gradients_through_after_one_step(tmp_path: Path) -> None:
    model = classifier()
    nn.init.zeros_(model[-1].weight)
    run = train(tmp_path / "run", model, AdamW(model.parameters(), lr=1e-3), steps=12)

    assert kinds(traindiff.check(run)) == set()


def test_gradients_that_float16_loses_are_a_warning(tmp_path: Path) -> None:
    model = classifier()

    def small(outputs: Tensor, labels: Tensor) -> Tensor:
        return 1e-4 * nn.functional.cross_entropy(outputs.float(), labels)

    run = train(
        tmp_path / "run", model, AdamW(model.parameters(), lr=1e-3), steps=6, autocast=torch.float16, loss_of=small
    )

    verdict = traindiff.check(run)
    finding = found(verdict, "underflow")
    assert verdict.verdict == "healthy"
    assert (finding.phase, finding.step) == ("backward", 0)
    assert finding.evidence["share"] > 0.5
    assert "subnormal in float16" in finding.message


def test_a_loss_scale_keeps_gradients_from_underflow(tmp_path: Path) -> None:
    model = classifier()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)

    def small(outputs: Tensor, labels: Tensor) -> Tensor:
        return 1e-4 * nn.functional.cross_entropy(outputs.float(), labels)

    optimizer = AdamW(model.parameters(), lr=1e-3)
    run = train(
        tmp_path / "run",
        model,
        optimizer,
        steps=6,
        autocast=torch.float16,
        loss_of=small,
        scaler=scaler,
        batches=points,
    )

    assert kinds(traindiff.check(run)) == set()
