"""Gradients in `main_grad`, where Megatron and what is built on it accumulate them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import traindiff
from tests.compat.msprobe.monitoring import configuration, directions, small, table, tables
from traindiff.compat.msprobe import PrecisionDebugger


def batches(steps: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(4, 6, generator=generator) for _ in range(steps))


def accumulate(model: nn.Module, *, keep: bool) -> None:
    """Move each gradient to `main_grad`, in float32; `keep` leaves something else in `.grad`."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.main_grad = parameter.grad.float() * 3  # type: ignore[attr-defined]
        if not keep:
            parameter.grad = None


def assert_rows_are_main_gradients(dump: Path, expected: list[dict[str, torch.Tensor]]) -> None:
    found = tables(dump)
    assert len(found) == len(expected)
    for step, (rows, own) in enumerate(zip(found, expected, strict=True)):
        assert list(rows) == list(own)
        for name, gradient in own.items():
            assert float(rows[name]["max"]) == gradient.max().item()
            assert float(rows[name]["norm"]) == pytest.approx(gradient.double().norm().item(), rel=1e-6)
            np.testing.assert_array_equal(directions(dump, step, name), (gradient > 0).numpy())


def main_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.main_grad.clone() for name, one in model.named_parameters()}  # type: ignore[attr-defined]


@pytest.mark.parametrize("keep", [True, False], ids=["beside .grad", "instead of .grad"])
def test_main_grad_is_read_before_grad(tmp_path: Path, keep: bool) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    debugger = PrecisionDebugger(configuration(tmp_path))
    debugger.monitor(model)
    expected = []
    for inputs in batches(3):
        model(inputs).square().mean().backward()
        accumulate(model, keep=keep)
        expected.append(main_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    debugger.stop()

    assert_rows_are_main_gradients(tmp_path / "dump", expected)


@pytest.mark.parametrize("others", [0, 1, 2])
def test_an_optimizer_of_copies_in_float32_is_monitored_as_that_of_the_model(tmp_path: Path, others: int) -> None:
    """As Megatron's optimizer of bfloat16 models; further ones, e.g. of experts, step after it and count nothing."""
    model = small().to(torch.bfloat16)
    copies = [parameter.detach().float().clone().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.Adam(copies, lr=0.01)
    beside = [torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1) for _ in range(others)]
    debugger = PrecisionDebugger(configuration(tmp_path, grad_level="L2"))
    debugger.monitor(model)
    expected = []
    for inputs in batches(3):
        model(inputs.to(torch.bfloat16)).square().mean().backward()
        accumulate(model, keep=False)
        expected.append(main_gradients(model))
        for copy, parameter in zip(copies, model.parameters(), strict=True):
            copy.grad = parameter.main_grad  # type: ignore[attr-defined]
        for one in (optimizer, *beside):
            one.step()
        with torch.no_grad():
            for copy, parameter in zip(copies, model.parameters(), strict=True):
                parameter.copy_(copy)
    debugger.stop()

    assert_rows_are_main_gradients(tmp_path / "dump", expected)


def test_the_optimizer_of_the_model_replaces_one_that_stepped_before_it(tmp_path: Path) -> None:
    model = small()
    other = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    debugger = PrecisionDebugger(configuration(tmp_path))
    debugger.monitor(model)
    for inputs in batches(3):
        model(inputs).square().mean().backward()
        accumulate(model, keep=True)
        other.step()
        own.step()
    debugger.stop()

    assert [len(rows) for rows in tables(tmp_path / "dump")] == [3] * 4  # the first step of the other one, and three


def test_optimizers_of_other_models_count_nothing_where_gradients_are_in_grad(tmp_path: Path) -> None:
    model = small()
    other = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
    debugger = PrecisionDebugger(configuration(tmp_path))
    debugger.monitor(model)
    other.step()
    with pytest.warns(traindiff.TraindiffWarning, match="no optimizer has stepped that holds parameters of what"):
        debugger.stop()
    assert not (tmp_path / "dump" / "rank0").exists()


def test_a_recording_has_main_grad_where_there_is_no_grad_and_else_what_the_optimizer_reads(tmp_path: Path) -> None:
    for keep in (True, False):
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with traindiff.record(tmp_path / str(keep), model, optimizer, observe="grad", strict=True):
            model(next(batches(1))).square().mean().backward()
            largest = max(one.grad.abs().max().item() for one in model.parameters() if one.grad is not None)
            accumulate(model, keep=keep)
            optimizer.step()
        (step,) = traindiff.open_recording(tmp_path / str(keep)).steps(0)
        found = [
            max(abs(summary["maximum"]), abs(summary["minimum"]))
            for seen, summary in zip(step.observations, step.summaries, strict=True)
            if (seen.phase, seen.stage, seen.slot) == ("grad", "", "grad")
        ]
        assert max(found) == pytest.approx(largest * (1 if keep else 3), rel=1e-6)


def test_stop_says_that_the_parameters_had_no_gradients(tmp_path: Path) -> None:
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    debugger = PrecisionDebugger(configuration(tmp_path))
    debugger.monitor(model)
    optimizer.step()
    with pytest.warns(traindiff.TraindiffWarning, match=r"no gradient was seen: .* parameter\.grad is None when"):
        debugger.stop()

    written = tmp_path / "dump" / "rank0" / "grad_summary_0.csv"
    assert table(written) == {}  # as msprobe has it: a header, and no rows
