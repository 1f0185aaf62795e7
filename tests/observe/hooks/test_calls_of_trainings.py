"""What a training gives torch's functions is handed on as it was given, and what it gets back is the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.testing._internal.two_tensor import TwoTensor

import traindiff
from tests.observe.hooks.reading import rows

INPUTS = torch.ones(2, 3)


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def losses(model: nn.Module) -> list[Tensor]:
    return [model(INPUTS).sum(), model(2 * INPUTS).sum()]


BACKWARD: dict[str, Callable[[nn.Module], Any]] = {
    "an iterator": lambda model: torch.autograd.backward(one for one in losses(model)),
    "an edge": lambda model: torch.autograd.backward(get_gradient_edge(losses(model)[0])),
    "edges in an iterator": lambda model: torch.autograd.backward(map(get_gradient_edge, losses(model))),
    "an edge as inputs": lambda model: losses(model)[0].backward(inputs=get_gradient_edge(model[0].weight)),  # type: ignore[index]
    "inputs by place": lambda model: torch.autograd.backward(
        losses(model)[:1], None, None, False, None, (one for one in [model[0].weight])  # type: ignore[index]
    ),
    "inputs in a dict": lambda model: losses(model)[0].backward(inputs=dict(model.named_parameters())),
    "grad": lambda model: torch.autograd.grad(
        (one for one in losses(model)), (one for one in model.parameters())
    ),
    "grad of a dict": lambda model: torch.autograd.grad(losses(model), dict(model.named_parameters())),
    "grad of an edge": lambda model: torch.autograd.grad(
        get_gradient_edge(losses(model)[0]), get_gradient_edge(model[0].weight)  # type: ignore[index]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BACKWARD)
def test_backward_passes_of_any_arguments_are_those_without_a_recording(name: str, tmp_path: Path) -> None:
    found = []
    for recorded in (False, True):
        model, optimizer = model_and_optimizer()
        with traindiff.record(tmp_path / "run", model, optimizer, strict=True) if recorded else nullcontext():
            returned = BACKWARD[name](model)
            if isinstance(returned, dict):
                returned = tuple(returned.values())
            found.append([*(one.grad for one in model.parameters()), *(returned or ())])
    for plain, seen in zip(*found, strict=True):
        assert (plain is None) is (seen is None)
        assert plain is None or torch.equal(plain, seen)
    assert any(one is not None for one in found[0])


class Scaled(torch.optim.SGD):
    """Has another first argument than the closure of other optimizers."""

    def step(self, scale: Any = 1.0) -> None:  # type: ignore[override]
        factor = scale() if callable(scale) else scale
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-group["lr"] * factor)


@pytest.mark.parametrize("argument", [0.5, lambda: 0.5])
def test_a_first_argument_of_step_that_is_no_closure_stays_as_it_is(argument: Any, tmp_path: Path) -> None:
    model, _ = model_and_optimizer()
    optimizer, before = Scaled(model.parameters(), lr=1.0), [one.detach().clone() for one in model.parameters()]
    seen = []
    optimizer.register_step_pre_hook(lambda _, args, kwargs: seen.append(args[1]))
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True) as run:
        for one in losses(model):
            one.backward()
        optimizer.step(argument)

    for parameter, start in zip(model.parameters(), before, strict=True):
        assert parameter.grad is not None
        assert torch.allclose(parameter, start - 0.5 * parameter.grad)
    assert seen == [argument]
    assert run.steps == {"optimizer": 1}


@pytest.mark.parametrize("is_first", [False, True])
def test_gradients_are_those_that_hooks_of_the_training_leave(tmp_path: Path, *, is_first: bool) -> None:
    model, optimizer = model_and_optimizer()

    def halve(*_: object) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

    def register() -> None:
        optimizer.register_step_pre_hook(halve)

    if is_first:
        register()
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        if not is_first:
            register()
        for _ in range(3):
            model(INPUTS).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    (_, gradient), *_ = rows(tmp_path / "run", phase="grad", path="1.bias", slot="grad", stage="", step=0)
    assert float(gradient["sum"]) == 1.0  # 2 by the loss
    assert traindiff.check(tmp_path / "run").verdict == "healthy"


@pytest.mark.parametrize("with_witness", [False, True])
def test_torch_can_swap_the_content_of_parameters(tmp_path: Path, *, with_witness: bool) -> None:
    model, optimizer = model_and_optimizer()
    swap = torch.utils.swap_tensors
    observe = {"witness", "products"} if with_witness else None
    with traindiff.record(tmp_path / "run", model, optimizer, observe=observe, strict=True):
        for step in range(4):
            model(INPUTS).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                torch.__future__.set_swap_module_params_on_conversion(True)
                try:
                    model.load_state_dict({name: one + 1.0 for name, one in model.state_dict().items()})
                finally:
                    torch.__future__.set_swap_module_params_on_conversion(False)
    assert torch.utils.swap_tensors is swap
    if not with_witness:
        edited = rows(tmp_path / "run", phase="param", path="1.bias", slot="value", stage="edited")
        assert [seen.step for seen, _ in edited] == [2]


def test_parameters_of_other_classes_can_be_converted(tmp_path: Path) -> None:
    model = nn.Linear(3, 1, bias=False)
    weight = model.weight.detach()
    model.weight = nn.Parameter(TwoTensor(weight.clone(), weight.clone()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    with traindiff.record(tmp_path / "run", model, optimizer):
        for _ in range(3):
            model(INPUTS).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        model.to(torch.float64)
    assert model.weight.dtype == torch.float64


class Other(torch.Tensor):
    """Notes which functions of torch it is given to."""

    calls: list[str]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(getattr(function, "__name__", ""))
        return super().__torch_function__(function, types, args, kwargs or {})


class Returns(torch.autograd.Function):
    """Gives its input a gradient of another class in later steps."""

    other = False

    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        return given.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.clone().as_subclass(Other) if Returns.other else gradient.clone()


def test_a_gradient_of_another_class_is_not_asked_for_its_attributes(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    Other.calls = []
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for step in range(6):
            Returns.other = step >= 4
            Returns.apply(model(INPUTS)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert Other.calls == []
