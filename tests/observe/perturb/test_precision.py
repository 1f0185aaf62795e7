"""Replicas in a longer dtype: everything is computed in it, draws are as ever, and dtypes come back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import traindiff
from tests.observe.hooks.reading import rows
from tests.observe.perturb.test_reordered_operators import Sink as OpenSink
from traindiff.observe.torch.perturb.precision import PrecisionReplica


class Sink(OpenSink):
    """Lets errors through, and keeps what was not promoted."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def altering(self, _tap: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        return hook

    def unobserved(self, reason: str, **_: Any) -> None:
        self.reasons.append(reason)


def draws(model: nn.Module, *, replica: bool, autocast: bool, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """What a forward pass returns, by a seed."""
    torch.manual_seed(3)
    context = PrecisionReplica(dtype, model).attach(Sink()) if replica else nullcontext()
    with context, torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        return list(model(torch.linspace(-1, 1, 64).view(4, 16)))


class Drawing(nn.Module):
    """Draws at random in every way that takes its dtype from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(16, 40), nn.Dropout(0.4)
        nn.init.constant_(self.layer.weight, 0.5)
        nn.init.constant_(self.layer.bias, 1.0)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.layer(x)
        return (
            self.drop(torch.ones_like(x)) != 0,
            torch.randn_like(x),
            torch.randn(40),
            torch.rand(40, dtype=torch.bfloat16),
            torch.randn(40, dtype=self.layer.weight.dtype),
            torch.empty_like(x).normal_(),
            torch.empty(40).uniform_(),
            torch.bernoulli(torch.full((40,), 0.5)),
            torch.zeros(40, dtype=torch.float16).exponential_(),
            torch.nn.functional.alpha_dropout(torch.ones_like(x), 0.3, training=True) > 0.9,
            torch.randint(0, 9, (5,)),
        )


@pytest.mark.parametrize("autocast", [False, True])
def test_a_replica_draws_what_the_training_draws(autocast: bool) -> None:
    model = Drawing()
    expected = draws(model, replica=False, autocast=autocast)
    state = torch.get_rng_state()

    actual = draws(model, replica=True, autocast=autocast)

    assert torch.equal(torch.get_rng_state(), state)
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == (torch.float64 if other.is_floating_point() else other.dtype)
        assert torch.equal(one, other.to(one.dtype))


def test_a_bfloat16_training_can_be_computed_in_float32() -> None:
    model = Drawing().to(torch.bfloat16)

    def batch(replica: bool) -> list[Tensor]:
        torch.manual_seed(3)
        with PrecisionReplica(torch.float32, model).attach(Sink()) if replica else nullcontext():
            return list(model(torch.linspace(-1, 1, 64).view(4, 16).to(torch.bfloat16)))

    expected, actual = batch(replica=False), batch(replica=True)

    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == (torch.float32 if other.is_floating_point() else other.dtype)
        assert torch.equal(one, other.to(one.dtype))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


class Casting(nn.Module):
    """Asks for shorter dtypes in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(16, 32), nn.Linear(32, 8), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).to(torch.bfloat16).float().half()
        scale = torch.zeros(32, dtype=torch.float32) + torch.tensor([1.0]) + torch.arange(32) / 7
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.second(self.norm(hidden.float() * scale).relu())
        return hidden.sum(dtype=torch.float32) / 3


def test_everything_is_computed_in_float64() -> None:
    torch.manual_seed(0)
    model, exact = Casting(), Casting()
    exact.load_state_dict(model.state_dict())
    batch = torch.randn(5, 16)
    sink = Sink()
    with PrecisionReplica(torch.float64, model).attach(sink):
        loss = model(batch)
        loss.backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]

    exact.double()
    x = exact.first(batch.double()) * (1.0 + torch.arange(32, dtype=torch.float64) / 7)
    expected = exact.second(exact.norm(x).relu()).sum() / 3
    expected.backward()
    assert loss.dtype == torch.float64
    assert torch.allclose(loss, expected, rtol=1e-13)
    for gradient, parameter in zip(gradients, exact.parameters(), strict=True):
        assert torch.allclose(gradient, parameter.grad, rtol=1e-11, atol=1e-12)
    assert sink.reasons == []


def test_the_users_tensors_keep_their_dtype_and_their_gradients() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    batch = torch.randn(3, 4, requires_grad=True)
    kept = torch.zeros(3, 4)
    with PrecisionReplica(torch.float64, model).attach(Sink()):
        output = model(batch.sin())
        kept += output.detach()
        output.sum().backward()

    assert batch.grad.dtype == batch.dtype == kept.dtype == torch.float32
    assert torch.equal(kept, output.detach().float())


@pytest.mark.parametrize("fused", [None, True])
def test_dtypes_are_restored_at_the_end_with_values_rounded(fused: bool | None, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2).to(torch.bfloat16))
    model.append(nn.Linear(2, 2).double())
    model[2].register_forward_pre_hook(lambda _, args: (args[0].to(torch.bfloat16),))
    model[3].register_forward_pre_hook(lambda _, args: (args[0].double(),))
    optimizer = AdamW(model.parameters(), lr=0.01, fused=fused)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()

    step()
    objects = [id(tensor) for tensor in (*model.parameters(), *model.buffers())]
    dtypes = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    states = [{key: value.dtype for key, value in state.items()} for state in optimizer.state.values()]
    with traindiff.record(tmp_path / "run", model, optimizer, replica="float64", strict=True):
        step()
        step()
        longer = [parameter.detach().clone() for parameter in model.parameters()]
        assert {tensor.dtype for tensor in longer} == {torch.float64}

    assert [id(tensor) for tensor in (*model.parameters(), *model.buffers())] == objects
    assert {name: tensor.dtype for name, tensor in model.state_dict().items()} == dtypes
    assert [{key: value.dtype for key, value in state.items()} for state in optimizer.state.values()] == states
    for parameter, value in zip(model.parameters(), longer, strict=True):
        assert torch.equal(parameter, value.to(parameter.dtype))
        assert parameter.grad.dtype == parameter.dtype
    step()
    seen = rows(tmp_path / "run", phase="optimizer", path="0.weight", slot="exp_avg")
    assert {one.dtype for one, _ in seen} == {"float64"}


def test_what_cannot_be_promoted_is_computed_as_ever_and_noted() -> None:
    @torch.library.custom_op("traindiff_tests::float32_only", mutates_args=())
    def float32_only(x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise RuntimeError(f"not implemented for {x.dtype}")
        return x * 2

    sink = Sink()
    model = nn.Linear(2, 2)
    with torch.no_grad(), PrecisionReplica(torch.float64, model).attach(sink):
        result = float32_only(model(torch.ones(1, 2)))

    assert result.dtype == torch.float64
    assert sink.reasons == [
        "traindiff_tests.float32_only.default cannot compute in float64, and did in a shorter dtype"
    ]


def test_an_error_of_the_training_is_the_trainings() -> None:
    model = nn.Linear(2, 2)
    with (
        PrecisionReplica(torch.float64, model).attach(Sink()),
        pytest.raises(RuntimeError, match="cannot be multiplied"),
    ):
        model(torch.ones(1, 3))


def test_a_model_that_keeps_its_parameters_elsewhere_is_refused(tmp_path: Path) -> None:
    class DistributedDataParallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    with pytest.raises(traindiff.ConfigError, match="which DistributedDataParallel does not allow"):
        traindiff.record(tmp_path / "run", DistributedDataParallel(), replica="float64")


def test_gradients_that_were_there_before_are_added_to(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    with traindiff.record(tmp_path / "run", model, optimizer, replica="float64", strict=True):
        model(torch.ones(1, 4)).sum().backward()
        assert torch.equal(model.weight.grad, torch.full((2, 4), 2.0, dtype=torch.float64))
        optimizer.step()
