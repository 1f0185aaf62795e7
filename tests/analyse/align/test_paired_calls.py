"""Runs of which one calls the model for passes that the other one computes by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

import traindiff

Form = Literal["module", "functional", "by hand"]
Fault = Literal["", "gradient", "row", "rate"]


def by_hand(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    for layer in ("0", "2", "4"):
        x = functional.linear(x, parameters[f"{layer}.weight"], parameters[f"{layer}.bias"])
        x = x if layer == "4" else torch.tanh(x)
    return x


def output(form: Form, model: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    if form == "by hand":
        return by_hand(parameters, x)
    found: Tensor = functional_call(model, parameters, (x,)) if form == "functional" else model(x)
    return found


def adapted(path: Path, *, first: Form, second: Form, outer: Form = "functional", fault: Fault = "") -> Path:
    """Two steps of an inner loop, and what the adapted parameters give for other samples (MAML)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with traindiff.record(path, model, optimizer):
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for _ in range(2):
                x, queries = (torch.randn(10, 4, generator=generator) for _ in range(2))
                target = torch.randn(4, 1, generator=generator)
                parameters = dict(model.named_parameters())
                for form in (first, second):
                    inner = functional.mse_loss(output(form, model, parameters, x), x @ target)
                    gradients = torch.autograd.grad(inner, list(parameters.values()), create_graph=True)
                    rate = 0.12 if fault == "rate" else 0.1
                    parameters = {
                        name: held - rate * gradient
                        for (name, held), gradient in zip(parameters.items(), gradients, strict=True)
                    }
                (functional.mse_loss(output(outer, model, parameters, queries), queries @ target) / 2).backward()
            gradient = model.get_parameter("2.weight").grad
            assert gradient is not None
            if fault == "gradient":
                gradient *= 1.5
            if fault == "row":
                gradient[3] = 0.0
            optimizer.step()
            optimizer.zero_grad()
    return path


@pytest.mark.parametrize("first", ["module", "by hand"])
@pytest.mark.parametrize("second", ["functional", "by hand"])
@pytest.mark.parametrize("outer", ["functional", "by hand"])
def test_passes_that_only_one_run_computes_by_the_model_are_no_other_batch(
    tmp_path: Path, first: Form, second: Form, outer: Form
) -> None:
    all_called = adapted(tmp_path / "called", first="module", second="functional")
    other = adapted(tmp_path / "other", first=first, second=second, outer=outer)
    for baseline, candidate in ((all_called, other), (other, all_called)):
        found = traindiff.compare(baseline, candidate)
        assert found.verdict in ("identical", "equivalent"), found.first_divergence
        assert found.exit_code == 0


def test_runs_that_call_the_model_for_other_passes_of_the_same_training_are_equivalent(tmp_path: Path) -> None:
    inner = adapted(tmp_path / "inner", first="module", second="functional", outer="by hand")
    outer = adapted(tmp_path / "outer", first="by hand", second="by hand")

    assert traindiff.compare(inner, outer).verdict == "equivalent"
    assert traindiff.compare(outer, inner).verdict == "equivalent"


@pytest.mark.parametrize("outer", ["functional", "by hand"])
@pytest.mark.parametrize(
    ("fault", "words"), [("gradient", "The candidate's is 1.5 x the baseline's"), ("row", "in row 3 (of 16) only")]
)
def test_a_wrong_gradient_behind_such_passes_is_found_where_it_is(
    tmp_path: Path, outer: Form, fault: Fault, words: str
) -> None:
    called = adapted(tmp_path / "called", first="module", second="functional")
    wrong = adapted(tmp_path / "wrong", first="by hand", second="by hand", outer=outer, fault=fault)

    found = traindiff.compare(called, wrong)

    first = found.first_divergence
    assert first is not None
    assert (found.verdict, first.step, first.phase, first.path) == ("diverged", 0, "grad", "2.weight")
    assert words in first.message


def test_a_wrong_step_of_the_inner_loop_shows_in_the_call_that_follows_it(tmp_path: Path) -> None:
    called = adapted(tmp_path / "called", first="module", second="functional")
    wrong = adapted(tmp_path / "wrong", first="by hand", second="by hand", fault="rate")

    first = traindiff.compare(called, wrong).first_divergence

    assert first is not None
    assert (first.step, first.phase, first.path) == (0, "forward", "0")


def test_another_batch_is_not_hidden_by_another_number_of_calls(tmp_path: Path) -> None:
    def train(path: Path, *, calls: int, seed: int) -> Path:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with traindiff.record(path, model, optimizer):
            for step in range(2):
                generator = torch.Generator().manual_seed(seed + step)
                torch.stack(
                    [model(torch.randn(8, 4, generator=generator)).sum() for _ in range(calls)]
                ).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return path

    twice = train(tmp_path / "twice", calls=2, seed=0)
    found = traindiff.compare(twice, train(tmp_path / "thrice", calls=3, seed=10))

    assert found.verdict == "misaligned"
    assert found.findings[0].kind == "batch"
