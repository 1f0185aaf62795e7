"""Inputs of a model that are its own outputs: the hidden state of a recurrent model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import traindiff
from traindiff.analyse.compare.verdict import Comparison

Change = Callable[[Tensor], Tensor | None]


class Recurrent(nn.Module):
    """A model that is handed its state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.recurrent = nn.GRU(8, 12, batch_first=True)
        self.head = nn.Linear(12, 20)

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        outputs, state = self.recurrent(self.embedding(tokens), state)
        assert state is not None
        return self.head(outputs), state


def unchanged(state: Tensor) -> Tensor:
    return state


def trained(
    path: Path,
    *,
    at_3: Change = unchanged,
    always: Change = unchanged,
    micro_batches: int = 1,
    fused: bool = False,
    record: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    torch.manual_seed(0)
    model = Recurrent()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=fused)
    tokens = torch.randint(20, (4, 31), generator=torch.Generator().manual_seed(1))
    state: Tensor | None = None
    with traindiff.record(path, model, optimizer, **record):
        for step in range(5):
            window = tokens[:, 6 * step : 6 * step + 7]
            if state is not None:
                state = always(state)
            if step == 3 and state is not None:
                state = at_3(state)
            states = [None] * micro_batches if state is None else list(state.chunk(micro_batches, 1))
            after = []
            for part, own in zip(window.chunk(micro_batches), states, strict=True):
                outputs, new = model(part[:, :-1], None if own is None else own.contiguous())
                (cross_entropy(outputs.transpose(1, 2), part[:, 1:]) / micro_batches).backward()
                after.append(new.detach())
            state = torch.cat(after, 1)
            optimizer.step()
            optimizer.zero_grad()
    return path


def compared(where: Path, **candidate: object) -> Comparison:
    return traindiff.compare(trained(where / "b"), trained(where / "c", **candidate))  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [{"fused": True}, {"micro_batches": 2}, {"micro_batches": 2, "fused": True}])
def test_a_state_that_differs_by_rounding_is_no_other_batch(change: dict[str, object], tmp_path: Path) -> None:
    found = compared(tmp_path, **change)

    assert (found.verdict, found.findings) == ("equivalent", ())


def test_what_is_computed_from_a_state_outside_the_model_may_differ_as_the_state_does(tmp_path: Path) -> None:
    def masked(state: Tensor) -> Tensor:
        return state * torch.tensor([1.0, 1.0, 0.0, 1.0]).view(1, 4, 1)

    runs = [trained(tmp_path / str(fused), always=masked, fused=fused) for fused in (False, True)]
    found = traindiff.compare(*runs)

    assert (found.verdict, found.findings) == ("equivalent", ())
    assert any(" on by no more than " in note for note in found.notes)


@pytest.mark.parametrize("replica", ["ulp:2", "reorder:1"])
def test_replicas_of_a_training_with_a_state_measure_its_noise(replica: str, tmp_path: Path) -> None:
    def run(name: str, **about: Any) -> Path:
        return trained(tmp_path / name, record=about)

    baseline, noise = run("b"), [run("n1", replica="ulp:1"), run("n2", replica=replica)]
    legal = traindiff.compare(baseline, trained(tmp_path / "c", fused=True), noise=noise)
    lost = traindiff.compare(baseline, trained(tmp_path / "lost", at_3=torch.zeros_like), noise=noise)

    assert (legal.verdict, legal.calibrated) == ("equivalent", True)
    assert lost.verdict == "misaligned"
    with pytest.raises(traindiff.ConfigError, match=r"is no other run of the baseline's training. In step 3"):
        traindiff.compare(baseline, noise[0], noise=tmp_path / "lost")


class Denoiser(nn.Sequential):
    """Reads a noisy sample, and what it made of it before."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 4))


def prepared(path: Path, *, fault: Change = unchanged, dtype: torch.dtype = torch.float32, **about: Any) -> Path:
    """A training that computes the inputs of its model: normalized data, and its own first estimate."""
    torch.manual_seed(0)
    model = Denoiser().to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with traindiff.record(path, model, optimizer, **about):
        for step in range(4):
            data = torch.randn(32, 4, generator=torch.Generator().manual_seed(step))
            data = (data - data.mean(0)) / data.std(0)
            changed = fault(data) if step == 2 else data
            assert changed is not None
            given = changed.to(dtype)
            with torch.no_grad():
                estimate = model(torch.cat([given, torch.zeros_like(given)], 1))
            (model(torch.cat([given, estimate], 1)) - given).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("replica", ["ulp:1", "reorder:1"])
def test_inputs_that_a_training_computes_differ_by_rounding(replica: str, dtype: torch.dtype, tmp_path: Path) -> None:
    baseline = prepared(tmp_path / "b", dtype=dtype)
    candidate = prepared(tmp_path / "c", dtype=dtype, replica=replica)
    noise = [prepared(tmp_path / str(number), dtype=dtype, replica=f"ulp:{number}") for number in (2, 3)]

    found = traindiff.compare(baseline, candidate)
    measured = traindiff.compare(baseline, candidate, noise=noise)

    for one in (found, measured):
        assert (one.verdict in ("equivalent", "identical"), one.findings) == (True, ())
    assert found.verdict == "identical" or any(" on by no more than " in note for note in found.notes)


@pytest.mark.parametrize(
    "fault",
    [
        lambda data: 1.0001 * data,
        lambda data: data + 1e-5,
        lambda data: torch.cat([data[:-1], data[:1]]),
        lambda data: data.bfloat16().float(),
    ],
    ids=["scaled", "shifted", "a sample twice", "rounded"],
)
def test_an_input_that_differs_by_more_than_rounding_is_another_batch(fault: Change, tmp_path: Path) -> None:
    first = traindiff.compare(prepared(tmp_path / "b"), prepared(tmp_path / "c", fault=fault)).first_divergence

    assert first is not None
    assert (first.step, first.phase, first.slot) == (2, "batch", "input[0]")


CHANGED = "In the candidate it is not: is a state lost, or changed on its way?"
NOT_GIVEN = "The candidate gives the model no (root) input[1] in this step, the baseline does"


@pytest.mark.parametrize(
    ("fault", "micro_batches", "told"),
    [
        (torch.zeros_like, 1, CHANGED),
        (lambda state: 1.01 * state, 1, CHANGED),
        (lambda state: 1.01 * state, 2, CHANGED),
        (lambda _: None, 1, NOT_GIVEN),
        (lambda _: None, 2, NOT_GIVEN),
    ],
)
def test_a_state_that_is_lost_or_changed_is_named_at_the_input(
    fault: Change, told: str, micro_batches: int, tmp_path: Path
) -> None:
    found = compared(tmp_path, at_3=fault, micro_batches=micro_batches)

    first = found.first_divergence
    assert found.verdict == "misaligned"
    assert first is not None
    assert (first.step, first.phase, first.path, first.slot) == (3, "batch", "", "input[1]")
    assert told in first.message


def test_a_state_whose_samples_are_exchanged_is_named_at_the_input(tmp_path: Path) -> None:
    first = compared(tmp_path, at_3=lambda state: state.roll(1, 1)).first_divergence

    assert first is not None
    assert (first.step, first.phase, first.slot) == (3, "batch", "input[1]")
    assert "in another order" in first.message


def test_an_input_that_only_one_run_ever_gives_is_no_lost_state(tmp_path: Path) -> None:
    found = traindiff.compare(
        trained(tmp_path / "b", always=lambda _: None), trained(tmp_path / "c", always=torch.zeros_like)
    )

    assert "misaligned" not in found.verdict
