"""Whole trainings in each replica: the GPT of the demo, a ConvNet, an LSTM, and two that differentiate a gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

import traindiff
from tests.observe.hooks.reading import rows
from traindiff.run.demo import training
from traindiff.run.demo.loop import DemoSettings
from traindiff.run.demo.model import ModelSize

REPLICAS = ("ulp:1", "reorder:1", "float64")

SMALL = DemoSettings(size=ModelSize(num_layers=2, width=40, num_heads=2, context=16), batch_size=4)


def gpt(path: Path, replica: str | None, *, micro_batches: int) -> list[float]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(traindiff, "record", partial(traindiff.record, replica=replica, strict=True))
        numbers = training.train(path, steps=4, settings=SMALL, micro_batches=micro_batches)
    return [number.loss for number in numbers]


class ConvNet(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.SiLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(144, 10),
        )  # fmt: skip

    @staticmethod
    def batch(step: int) -> Tensor:
        return torch.randn(8, 3, 10, 10, generator=torch.Generator().manual_seed(step))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 12, num_layers=2, batch_first=True, dropout=0.1), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])

    @staticmethod
    def batch(step: int) -> Tensor:
        return torch.randn(8, 5, 6, generator=torch.Generator().manual_seed(step))


def fit(make: Callable[[], nn.Module], path: Path, replica: str | None) -> list[float]:
    torch.manual_seed(0)
    model = make()
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)
    labels, losses = torch.arange(8), []
    with traindiff.record(path, model, optimizer, strict=True, replica=replica) as run:
        for step in range(3):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(model.batch(step)), labels)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
            run.log("loss", losses[-1])
    return losses


def critic() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 24), nn.SiLU(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))


def penalized(model: nn.Module, step: int) -> Tensor:
    """Of a critic: what it says, and a penalty on its gradient, as in WGAN-GP."""
    points = torch.randn(16, 6, generator=torch.Generator().manual_seed(step)).requires_grad_()
    said = model(points)
    (gradient,) = torch.autograd.grad(said.sum(), points, create_graph=True)
    return said.mean() + 10.0 * (gradient.norm(dim=1) - 1.0).square().mean()


def after_an_inner_step(model: nn.Module, step: int) -> Tensor:
    """The loss after a step of gradient descent, through which the gradient goes, as in MAML."""
    drawn = torch.randn(2, 16, 6, generator=torch.Generator().manual_seed(step))
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(model(drawn[0]).square().mean(), list(parameters.values()), create_graph=True)
    moved = {name: one - 0.1 * own for (name, one), own in zip(parameters.items(), gradients, strict=True)}
    return (torch.func.functional_call(model, moved, (drawn[1],)) - 1.0).square().mean()


def differentiate_twice(loss_of: Callable[[nn.Module, int], Tensor], path: Path, replica: str | None) -> list[float]:
    model = critic()
    optimizer, losses = SGD(model.parameters(), lr=0.02, momentum=0.9), []
    with traindiff.record(path, model, optimizer, strict=True, replica=replica) as run:
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            run.log("loss", losses[-1])
    return losses


TRAININGS: dict[str, Callable[[Path, str | None], list[float]]] = {
    "gpt": partial(gpt, micro_batches=1),
    "accumulation": partial(gpt, micro_batches=2),
    "conv": partial(fit, ConvNet),
    "lstm": partial(fit, Recurrent),
    "gradient-penalty": partial(differentiate_twice, penalized),
    "inner-step": partial(differentiate_twice, after_an_inner_step),
}


@pytest.mark.parametrize("replica", REPLICAS)
@pytest.mark.parametrize("name", TRAININGS)
def test_a_replica_trains_as_the_baseline_does_within_rounding(name: str, replica: str, tmp_path: Path) -> None:
    expected = TRAININGS[name](tmp_path / "base", None)

    actual = TRAININGS[name](tmp_path / "run", replica)

    assert actual == pytest.approx(expected, rel=2e-6)
    comparison = traindiff.compare(tmp_path / "base", tmp_path / "run")
    assert comparison.verdict == "equivalent", str(comparison)  # and not "identical"
    assert comparison.unaligned == ((), ())


@pytest.mark.parametrize("activation", [nn.Tanh, nn.Sigmoid, partial(nn.Softmax, dim=-1)])
def test_gradients_that_flow_to_what_an_operation_saved_are_seen_in_a_replica(
    activation: Callable[[], nn.Module], tmp_path: Path
) -> None:
    """A gradient that is differentiated again flows to the output that Tanh saved, and not to a rounded copy of it."""

    def train(path: Path, replica: str | None) -> dict[tuple[str, str, int], float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 8), activation(), nn.Linear(8, 8), activation(), nn.Linear(8, 1))
        x = torch.linspace(-1, 1, 5)[:, None].requires_grad_()
        optimizer = SGD(model.parameters(), lr=0.01)
        with traindiff.record(path, model, optimizer, strict=True, replica=replica):
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            (bend,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
            (bend + x).square().mean().backward()
            optimizer.step()
        return {
            (seen.path, seen.stage, seen.call): float(summary["sum_of_squares"])
            for seen, summary in rows(path, phase="backward")
        }

    assert train(tmp_path / "run", "ulp:1") == pytest.approx(train(tmp_path / "base", None), rel=1e-4)


def test_calls_under_vmap_are_rounded_sample_by_sample(tmp_path: Path) -> None:
    def train(path: Path, replica: str | None) -> Tensor:
        model = critic()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
        parameters = {name: one.detach() for name, one in model.named_parameters()}

        def loss(parameters: dict[str, Tensor], one: Tensor) -> Tensor:
            return torch.func.functional_call(model, parameters, (one,)).square().sum()

        with traindiff.record(path, model, SGD(model.parameters(), lr=0.01), strict=True, replica=replica):
            found = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
        return torch.cat([one.flatten(1) for one in found.values()], dim=1)

    expected, actual = train(tmp_path / "base", None), train(tmp_path / "run", "ulp:1")

    assert ((actual - expected).norm(dim=1) > 0).all()
    assert torch.allclose(actual, expected, rtol=1e-4, atol=1e-6)


class Largest(nn.Module):
    """Its gradient compares the input with the output that was saved."""

    def forward(self, x: Tensor) -> Tensor:
        return x.amax(dim=1, keepdim=True)


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(_: object, x: Tensor, parameter: Tensor) -> Tensor:
        return x.detach() if parameter.requires_grad else x.clone()

    @staticmethod
    def backward(_: object, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gradient, gradient.sum()


class Attached(nn.Module):
    """Returns its input's storage as a result of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _Attached.apply(x, self.scale)  # type: ignore[no-untyped-call]
        return found


def test_a_replica_writes_to_nothing_that_others_hold(tmp_path: Path) -> None:
    """A rounded output is no element of the input any more, and may share its storage with the data."""

    def train(path: Path, replica: str | None) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        data = torch.randn(4, 6)
        model = nn.Sequential(Attached(), nn.Linear(6, 8), Largest(), nn.Linear(1, 2))
        optimizer = SGD(model.parameters(), lr=0.01)
        with traindiff.record(path, model, optimizer, strict=True, replica=replica):
            model(data).square().mean().backward()
            optimizer.step()
        weight = model[1].weight
        assert weight.grad is not None
        return data, weight.grad

    (data, expected), (same, actual) = train(tmp_path / "base", None), train(tmp_path / "run", "ulp:1")

    assert torch.equal(data, same)
    assert expected.any()
    assert torch.allclose(actual, expected, rtol=1e-4)


def test_a_backward_pass_for_an_input_is_no_micro_step_in_a_replica_either(tmp_path: Path) -> None:
    def train(path: Path, replica: str | None = None) -> Path:
        torch.manual_seed(0)
        energy = nn.Sequential(nn.Linear(2, 16), nn.SiLU(), nn.Linear(16, 1))
        optimizer = SGD(energy.parameters(), lr=0.01)
        data = torch.Generator().manual_seed(1)
        with traindiff.record(path, energy, optimizer, replica=replica):
            for _ in range(3):
                energy.requires_grad_(False)
                fakes = torch.randn(8, 2, generator=data).requires_grad_()
                energy(fakes).sum().backward()  # a Langevin step: only the samples move
                assert fakes.grad is not None
                fakes = (fakes - fakes.grad).detach()
                energy.requires_grad_(True)
                optimizer.zero_grad()
                (energy(torch.randn(8, 2, generator=data)).mean() - energy(fakes).mean()).backward()
                optimizer.step()
        return path

    baseline, replica = train(tmp_path / "baseline"), train(tmp_path / "replica", "ulp:1")
    found = traindiff.compare(baseline, train(tmp_path / "again"), noise=[replica, train(tmp_path / "other", "ulp:2")])

    assert found.verdict == "identical"
    assert not rows(replica, phase="loss", micro_step=1)
