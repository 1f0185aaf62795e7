"""Replicas by random rounding: the same training within rounding, and nothing of it is left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD

import traindiff
from tests.observe.hooks.reading import rows
from tests.observe.perturb.replicas import train
from tests.observe.perturb.test_random_rounding import ulps
from traindiff.core.observation import RECOMPUTED
from traindiff.core.tap_registry import OBSERVABLE
from traindiff.observe.torch.perturb.ulp import randomly_rounded, rounding_key


def tensor_files(path: Path) -> dict[str, Tensor]:
    found = {}
    for file in sorted((path / "rank-00000" / "tensors").rglob("*.safetensors")):
        site = file.relative_to(path).with_suffix("").with_suffix("")  # the first of them is a checksum
        found |= {f"{site} {key}": tensor for key, tensor in load_file(file).items()}
    return found


class Watching(nn.Module):
    """Keeps what it receives, and the gradient of it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.received: list[Tensor] = []
        self.gradients: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.received.append(x.detach().clone())
        return self.layer(x)


def test_what_the_training_goes_on_with_is_what_was_recorded_and_one_ulp_from_what_was_computed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(8, 64), Watching(nn.Linear(64, 4))
    model = nn.Sequential(first, second)
    optimizer = SGD(model.parameters(), lr=0.1)
    batch = torch.randn(5, 8)
    computed = first(batch).detach()
    stepped: list[Tensor] = []
    with traindiff.record(tmp_path / "run", model, optimizer, observe=OBSERVABLE, detail="tensors", replica="ulp:3"):
        model(batch).square().mean().backward()
        before = first.bias.detach().clone()
        own_gradient = first.bias.grad.clone()
        optimizer.step()
        stepped.append((before - first.bias.detach()) / 0.1)

    received = second.received[0]
    assert 0.5 < (ulps(computed, received) != 0).double().mean() < 0.8
    assert ulps(computed, received).abs().max() == 1
    assert torch.equal(received, randomly_rounded(computed, rounding_key(3, 0, "forward", "0", "output[0]")))
    recorded = list(tensor_files(tmp_path / "run").values())
    assert any(torch.equal(tensor, received) for tensor in recorded if tensor.shape == received.shape)
    used = randomly_rounded(own_gradient, rounding_key(3, 0, "grad", "0.bias"))
    assert torch.equal(first.bias.grad, used)
    assert ulps(own_gradient, used).abs().max() == 1
    assert any(torch.equal(tensor, used) for tensor in recorded if tensor.shape == used.shape)
    assert torch.allclose(stepped[0], used, rtol=1e-3, atol=1e-6)


def test_gradients_are_rounded_before_they_are_recorded_and_flow_on(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), nn.Linear(8, 64, bias=False), nn.Tanh())
    batch = torch.randn(5, 8, requires_grad=True)
    weights = torch.randn(5, 64)
    with traindiff.record(tmp_path / "run", model, observe="backward", detail="tensors", replica="ulp:3"):
        (model(batch) * weights).sum().backward()

    recorded = {tuple(tensor.shape): tensor for tensor in tensor_files(tmp_path / "run").values()}
    gradients = [tensor for tensor in tensor_files(tmp_path / "run").values() if tensor.shape == (5, 64)]
    assert any(
        torch.equal(g, randomly_rounded(weights, rounding_key(3, 0, "backward", "2", "output[0]"))) for g in gradients
    )
    flowed = next(g for g in gradients if torch.allclose(g @ model[1].weight, batch.grad))
    assert torch.allclose(flowed @ model[1].weight.detach(), recorded[5, 8], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["checkpointing", "reentrant_checkpointing"])
def test_a_repeated_forward_pass_is_rounded_as_it_was_the_first_time(name: str, tmp_path: Path) -> None:
    train(name, tmp_path / "run", "ulp:1")

    found = rows(tmp_path / "run", phase="forward")
    first = {(seen.step, seen.path, seen.call): int(s["fingerprint"]) for seen, s in found if not seen.stage}
    again = {(seen.step, seen.path, seen.call): int(s["fingerprint"]) for seen, s in found if seen.stage == RECOMPUTED}
    assert again
    assert again.items() <= first.items()


def test_a_module_that_changes_its_input_and_one_that_passes_it_on(tmp_path: Path) -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.act, self.same = nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Identity()

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.layer(x)
            kept = self.same(hidden)
            assert kept is hidden
            inline = hidden * 2
            assert self.same(inline) is inline
            return self.act(inline), hidden

    model = Branching()
    with traindiff.record(tmp_path / "run", model, strict=True, replica="ulp:1"):
        first, second = model(torch.randn(3, 8))
        (first.sum() + second.sum()).backward()

    assert len(rows(tmp_path / "run", phase="backward", path="layer")) == 1


def test_inspected_tensors_are_rounded_too(tmp_path: Path) -> None:
    class Inspecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            inner = self.layer(x) * 3
            seen = traindiff.inspect("inner", inner)
            assert ulps(inner.detach(), seen.detach()).abs().max() == 1
            return seen * 2

    model = Inspecting()
    with traindiff.record(tmp_path / "run", model, strict=True, replica="ulp:1"):
        model(torch.randn(3, 8)).sum().backward()

    assert [seen.phase for seen, _ in rows(tmp_path / "run", path="inner")] == ["forward", "backward"]
