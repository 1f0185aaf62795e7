"""Gradients that a training asks for in another way than by one call of `backward`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad as imported_before
from torch.func import functional_call, grad
from torch.nn.functional import cross_entropy

import traindiff

Fill = Callable[[nn.Module, Tensor, Tensor, int], None]
"""Fills the gradients of a model for a batch with labels, in a step."""


def tasks(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    outputs = model(x)
    return cross_entropy(outputs[:6], y[:6]) / 2, cross_entropy(outputs[6:], y[6:]) / 2


def backward(model: nn.Module, x: Tensor, y: Tensor, _: int) -> None:
    torch.stack(tasks(model, x, y)).sum().backward()


def one_after_the_other(model: nn.Module, x: Tensor, y: Tensor, _: int) -> None:
    one, two = tasks(model, x, y)
    one.backward(retain_graph=True)
    two.backward()


def asked(*, factor: float = 1.0, imported: bool = False) -> Fill:
    def fill(model: nn.Module, x: Tensor, y: Tensor, step: int) -> None:
        ask = imported_before if imported else torch.autograd.grad
        parameters = list(model.parameters())
        found = ask(torch.stack(tasks(model, x, y)).sum(), parameters)
        for number, (parameter, gradient) in enumerate(zip(parameters, found, strict=True)):
            parameter.grad = gradient * (factor if (step, number) == (2, 0) else 1.0)

    return fill


def for_each_task(*, lost: int = -1) -> Fill:
    def fill(model: nn.Module, x: Tensor, y: Tensor, step: int) -> None:
        parameters = list(model.parameters())
        found = [torch.autograd.grad(one, parameters, retain_graph=True) for one in tasks(model, x, y)]
        for number, parameter in enumerate(parameters):
            parameter.grad = sum(one[number] for one in (found[:1] if step == lost else found))  # type: ignore[assignment]

    return fill


def of_functions(model: nn.Module, x: Tensor, y: Tensor, _: int) -> None:
    def loss(values: dict[str, Tensor]) -> Tensor:
        outputs = functional_call(model, values, (x,))
        return (cross_entropy(outputs[:6], y[:6]) + cross_entropy(outputs[6:], y[6:])) / 2

    found = grad(loss)({name: one.detach() for name, one in model.named_parameters()})
    for name, parameter in model.named_parameters():
        parameter.grad = found[name]


def trained(path: Path, fill: Fill) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with traindiff.record(path, model, optimizer):
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            x, y = torch.randn(12, 6, generator=generator), torch.randint(4, (12,), generator=generator)
            optimizer.zero_grad()
            fill(model, x, y, step)
            optimizer.step()
    return path


WAYS = {
    "one after the other": one_after_the_other,
    "asked": asked(),
    "imported": asked(imported=True),
    "for each task": for_each_task(),
    "of functions": of_functions,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("from_baseline", [True, False])
def test_the_same_gradients_are_the_same_training(way: str, from_baseline: bool, tmp_path: Path) -> None:
    runs = [trained(tmp_path / "backward", backward), trained(tmp_path / "other", WAYS[way])]
    found = traindiff.compare(*(runs if from_baseline else runs[::-1]))

    assert found.verdict in ("identical", "equivalent")
    assert found.findings == ()
    assert traindiff.check(runs[1]).verdict == "healthy"


@pytest.mark.parametrize("fault", [asked(factor=2.0), asked(factor=2.0, imported=True), for_each_task(lost=2)])
def test_a_wrong_gradient_is_found_where_it_is(fault: Fill, tmp_path: Path) -> None:
    found = traindiff.compare(trained(tmp_path / "b", backward), trained(tmp_path / "c", fault))

    assert found.verdict == "diverged"
    assert found.first_divergence is not None
    assert (found.first_divergence.step, found.first_divergence.phase) == (2, "grad")


def test_the_loss_of_gradients_that_are_asked_for_is_recorded(tmp_path: Path) -> None:
    found = traindiff.compare(trained(tmp_path / "b", backward), trained(tmp_path / "c", asked()))

    assert ("loss", "loss") in {(row.phase, row.path) for row in found.differences}


def test_a_loss_that_one_run_lacks_is_noted(tmp_path: Path) -> None:
    found = traindiff.compare(trained(tmp_path / "b", backward), trained(tmp_path / "c", asked(imported=True)))

    assert [(one.phase, one.path) for one in found.unaligned[0]] == [("loss", "loss")]


def test_gradients_for_a_penalty_are_no_loss(tmp_path: Path) -> None:
    def penalized(model: nn.Module, x: Tensor, y: Tensor, _: int) -> None:
        x.requires_grad_()
        loss = torch.stack(tasks(model, x, y)).sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()

    found = traindiff.compare(trained(tmp_path / "b", penalized), trained(tmp_path / "c", penalized))

    assert found.verdict == "identical"
    assert sum(row.phase == "loss" for row in found.differences) == 1
