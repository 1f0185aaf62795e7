"""The losses on which backward is called, and the function that is replaced to see them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import traindiff
from tests.observe.hooks.models import mlp
from tests.observe.hooks.reading import row, rows
from tests.observe.hooks.trainings import TRAININGS, batches
from traindiff.observe.torch.hooks.backward_calls import may_reach

BACKWARD = torch.autograd.backward


def losses(path: Path, step: int = 0) -> list[tuple[int, int, float]]:
    found = rows(path, phase="loss", path="loss", slot="backward", step=step)
    assert all(seen.merge == "sum" for seen, _ in found)
    return [(seen.micro_step, seen.call, float(summary["sum"])) for seen, summary in found]


def test_each_loss_is_recorded_as_a_term_of_the_sum_that_the_step_minimizes(tmp_path: Path) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    expected = []
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for part in next(batches()).split(2):
            loss = model(part).square().mean() / 3
            loss.backward()
            expected.append((len(expected), 0, loss.item()))
        optimizer.step()

    assert losses(tmp_path / "run") == expected


def test_all_ways_of_calling_backward_are_seen(tmp_path: Path) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        out = model(next(batches()))
        out[0, 0].backward(retain_graph=True)
        torch.autograd.backward(out[0, 1], retain_graph=True)
        torch.autograd.backward([out[0, 2], out[0, 3].reshape(1, 1)], retain_graph=True)
        torch.autograd.backward((out,), (torch.ones_like(out),))  # no scalar: no loss
        optimizer.step()

    assert [round(value, 5) for _, _, value in losses(tmp_path / "run")] == [
        round(value, 5) for value in out[0].tolist()
    ]
    assert [call for _, call, _ in losses(tmp_path / "run")] == [0, 1, 2, 3]


def test_a_backward_that_has_nothing_to_do_with_the_model_is_no_loss(tmp_path: Path) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        torch.ones((), requires_grad=True).exp().backward()
        model(next(batches())).sum().backward()
        optimizer.step()

    assert len(losses(tmp_path / "run")) == 1


def test_the_backward_of_another_model_is_no_loss_and_no_micro_step(tmp_path: Path) -> None:
    models = [mlp(), mlp()]
    optimizers = [SGD(model.parameters(), lr=0.1) for model in models]
    first = traindiff.record(tmp_path / "0", models[0], optimizers[0], strict=True)
    second = traindiff.record(tmp_path / "1", models[1], optimizers[1], strict=True)
    with first, second:
        for part in next(batches()).split(2):
            outputs = [model(part) for model in models]
            for output in outputs:
                output.sum().backward()
        for optimizer in optimizers:
            optimizer.step()

    for number in "01":
        assert [place[:2] for place in losses(tmp_path / number)] == [(0, 0), (1, 0), (2, 0)]


def test_parameters_behind_a_function_in_python_may_be_reached() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    ids = {id(parameter) for parameter in model.parameters()}
    x = torch.ones(3, 2, requires_grad=True)

    assert may_reach([model(x).sum()], ids)
    assert may_reach([checkpoint(model, x, use_reentrant=True).sum()], ids)
    assert not may_reach([nn.Linear(2, 2)(x).sum()], ids)
    assert may_reach([torch.ones(())], ids)  # backward will say what is wrong


def test_recomputation_inside_a_backward_is_no_loss(tmp_path: Path) -> None:
    TRAININGS["reentrant_checkpointing"](lambda *args: traindiff.record(tmp_path / "run", *args, strict=True))

    assert len(losses(tmp_path / "run", step=1)) == 1
    assert {seen.micro_step for seen, _ in rows(tmp_path / "run")} == {0}


def test_a_backward_that_raises_raises_and_is_still_put_back(tmp_path: Path) -> None:
    model = nn.Linear(8, 1)
    with traindiff.record(tmp_path / "run", model), pytest.raises(RuntimeError, match="does not require grad"):
        torch.ones(()).backward()

    assert torch.autograd.backward is BACKWARD


def test_the_replacement_looks_like_the_function_that_it_replaces(tmp_path: Path) -> None:
    with traindiff.record(tmp_path / "run", mlp()):
        assert torch.autograd.backward is not BACKWARD
        assert torch.autograd.backward.__name__ == "backward"
        assert torch.autograd.backward.__doc__ == BACKWARD.__doc__


def test_without_losses_micro_steps_are_still_counted(tmp_path: Path) -> None:
    TRAININGS["gradient_accumulation"](
        lambda *args: traindiff.record(tmp_path / "run", *args, observe="forward", strict=True)
    )

    assert losses(tmp_path / "run") == []
    assert [seen.micro_step for seen, _ in rows(tmp_path / "run", path="1", step=2)] == [0, 1, 2]


def test_a_loss_of_one_element_and_several_axes_is_a_scalar(tmp_path: Path) -> None:
    model = nn.Linear(8, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        model(next(batches())[:1]).backward()
        optimizer.step()

    assert row(tmp_path / "run", phase="loss")[0].shard.shape == ()
