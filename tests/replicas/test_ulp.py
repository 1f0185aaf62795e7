"""Replicas by random rounding: the same training within rounding, and nothing of it is left."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD

import traindiff
from tests.replicas.test_random_rounding import ulps
from tests.taps.reading import rows
from tests.taps.test_removal import assert_nothing_left
from tests.taps.test_undisturbed import assert_bitwise_equal
from tests.taps.trainings import TRAININGS, Outcome
from traindiff.replicas.random_rounding import randomly_rounded, rounding_key
from traindiff.settings import OBSERVABLE


def train(name: str, path: Path, replica: str | None, **options: Any) -> Outcome:
    def observe(model: nn.Module, optimizer: Any) -> traindiff.Recorder:
        return traindiff.record(path, model, optimizer, observe=OBSERVABLE, strict=True, replica=replica, **options)

    return TRAININGS[name](observe)


def fingerprints(path: Path, **where: Any) -> list[tuple[Any, ...]]:
    return [
        (seen.step, seen.micro_step, seen.phase, seen.stage, seen.path, seen.slot, seen.call, bytes(summary))
        for seen, summary in rows(path, **where)
    ]


@pytest.mark.parametrize("name", TRAININGS)
def test_a_replica_is_the_same_training_within_rounding(name: str, tmp_path: Path) -> None:
    expected = TRAININGS[name](lambda *_: nullcontext())

    actual = train(name, tmp_path / "run", "ulp:1", evaluation=True)

    assert list(actual) == list(expected)
    assert torch.equal(actual["final rng"], expected["final rng"])
    tolerance = 0.05 if name in ("bfloat16", "gradient_scaler") else 1e-4 if name != "lbfgs_with_a_closure" else 0.1
    for key, tensor in expected.items():
        if "step 0" in key:  # later ones follow from updates whose signs may be noise
            bound = tolerance * float(tensor.abs().max()) + 1e-6
            assert torch.allclose(actual[key], tensor, rtol=0, atol=bound), key
    assert any(not torch.equal(actual[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("name", TRAININGS)
def test_the_same_seed_makes_the_same_replica(name: str, tmp_path: Path) -> None:
    first, second, other = (
        train(name, tmp_path / run, replica) for run, replica in (("1", "ulp:1"), ("again", "ulp:1"), ("2", "ulp:2"))
    )

    assert_bitwise_equal(second, first)
    assert fingerprints(tmp_path / "again") == fingerprints(tmp_path / "1")
    assert any(not torch.equal(other[key], tensor) for key, tensor in first.items())


@pytest.mark.parametrize("name", TRAININGS)
def test_a_replica_has_the_same_observations_as_the_training(name: str, tmp_path: Path) -> None:
    train(name, tmp_path / "base", None)
    train(name, tmp_path / "run", "ulp:1")

    sites = [
        sorted(found[:-1] for found in fingerprints(tmp_path / run) if found[4] != "rng") for run in ("base", "run")
    ]
    if name != "lbfgs_with_a_closure":  # how often it calls the closure depends on rounding
        # More than the training: a hook on a view that is written to later is not called, on what was rounded it is.
        assert set(sites[0]) <= set(sites[1])
        assert len(sites[0]) == len(sites[1]) or name == "in_place_on_a_view"


@pytest.mark.parametrize("name", TRAININGS)
def test_closing_leaves_nothing_on_the_training(name: str, tmp_path: Path) -> None:
    seen: list[tuple[nn.Module, Any]] = []

    def observe(model: nn.Module, optimizer: Any) -> traindiff.Recorder:
        seen.append((model, optimizer))
        return traindiff.record(tmp_path / "run", model, optimizer, observe=OBSERVABLE, replica="ulp:1")

    TRAININGS[name](observe)

    model, optimizer = seen[0]
    assert_nothing_left(model, *(optimizer if isinstance(optimizer, list) else [optimizer] if optimizer else []))


def tensor_files(path: Path) -> dict[str, Tensor]:
    found = {}
    for file in sorted((path / "rank-00000" / "tensors").rglob("*.safetensors")):
        found |= {f"{file.relative_to(path)} {key}": tensor for key, tensor in load_file(file).items()}
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
    again = {(seen.step, seen.path, seen.call): int(s["fingerprint"]) for seen, s in found if seen.stage}
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


def test_a_fault_is_contained_and_the_recording_says_that_it_is_no_full_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise MemoryError("on purpose")

    expected = TRAININGS["plain"](lambda *_: nullcontext())
    monkeypatch.setattr("traindiff.replicas.ulp.randomly_rounded", broken)
    with pytest.warns(traindiff.TraindiffWarning, match="no longer perturbs the training, because of MemoryError"):
        actual = TRAININGS["plain"](lambda *args: traindiff.record(tmp_path / "run", *args, replica="ulp:1"))

    assert_bitwise_equal(actual, expected)
    assert [(seen.path, seen.slot, seen.unobserved) for seen, _ in rows(tmp_path / "run", path="traindiff")] == [
        ("traindiff", "replica", "this is no full replica: MemoryError: on purpose")
    ]


def test_a_recording_says_that_it_is_a_replica(tmp_path: Path) -> None:
    train("plain", tmp_path / "run", "ulp:12")
    train("plain", tmp_path / "base", None)

    assert traindiff.open_recording(str(tmp_path / "run")).run["settings"]["replica"] == "ulp:12"
    assert traindiff.open_recording(str(tmp_path / "base")).run["settings"]["replica"] is None


@pytest.mark.parametrize(
    "compile_it",
    [lambda model: torch.compile(model, backend="eager"), lambda model: model.compile(backend="eager") or model],
)
def test_a_compiled_model_is_refused_before_anything_is_attached(compile_it: Any, tmp_path: Path) -> None:
    model = compile_it(nn.Linear(2, 2))

    with pytest.raises(traindiff.ConfigError) as caught:
        traindiff.record(tmp_path / "run", model, replica="ulp:1")

    assert str(caught.value) == (
        "1 problem in record(...); nothing was attached to the model.\n"
        "\n"
        '  record(replica="ulp:1")\n'
        "    cannot perturb compiled code, and the model has some: (root).\n"
        "    Record the replica of the same training without torch.compile; what it measures holds for both."
    )
    assert not (tmp_path / "run").exists()
