"""BatchNorm in another mode, or over other micro-batches, and labels that no recording has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import traindiff
from traindiff.analyse.findings import Finding


def trained(
    path: Path, *, eval_at: int = -1, micro_batches: int = 1, wrong_label_at: int = -1, inspect: bool = False
) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with traindiff.record(path, model, optimizer):
        for step in range(4):
            inputs, labels = torch.randn(16, 6), torch.randint(4, (16,))
            if step == wrong_label_at:
                labels[5] = (labels[5] + 1) % 4
            if inspect:
                traindiff.inspect("labels", labels)
            model.train(step != eval_at)
            for some, their in zip(inputs.chunk(micro_batches), labels.chunk(micro_batches), strict=True):
                loss: Tensor = functional.cross_entropy(model(some), their) / micro_batches
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    return path


def first_of(baseline: Path, candidate: Path) -> Finding:
    first = traindiff.compare(baseline, candidate).first_divergence
    assert first is not None
    return first


@pytest.mark.parametrize("run", ["candidate", "baseline"])
def test_a_run_that_forgot_to_leave_evaluation_mode_is_named(run: str, tmp_path: Path) -> None:
    runs = {"candidate": -1, "baseline": -1, run: 2}
    baseline, candidate = (trained(tmp_path / name, eval_at=runs[name]) for name in ("baseline", "candidate"))

    first = first_of(baseline, candidate)

    assert (first.step, first.phase, first.path) == (2, "forward", "1")
    assert first.message.endswith(
        f"The {run}'s BatchNorm1d does not take note of this batch, the other run's does: is it in evaluation mode?"
    )


def test_statistics_of_micro_batches_are_said_to_differ_rightly(tmp_path: Path) -> None:
    first = first_of(trained(tmp_path / "whole"), trained(tmp_path / "divided", micro_batches=2))

    assert (first.step, first.phase, first.path) == (0, "forward", "1")
    assert first.message.endswith(
        "BatchNorm1d takes the statistics of each micro-batch, and the step has 1 in the baseline and 2 in the "
        "candidate: such runs differ rightly."
    )


def test_where_only_the_loss_differs_it_says_how_to_see_labels(tmp_path: Path) -> None:
    first = first_of(trained(tmp_path / "right"), trained(tmp_path / "wrong", wrong_label_at=1))

    assert (first.step, first.phase, first.site) == (1, "loss", "loss backward")
    assert first.message.endswith('traindiff.inspect("labels", labels) records them.')


def test_labels_that_were_inspected_are_found_themselves(tmp_path: Path) -> None:
    baseline = trained(tmp_path / "right", inspect=True)

    comparison = traindiff.compare(baseline, trained(tmp_path / "wrong", wrong_label_at=1, inspect=True))

    first = comparison.first_divergence
    assert first is not None
    assert (first.step, first.site) == (1, "labels value")
    assert all("traindiff.inspect" not in finding.message for finding in comparison.findings)


def test_nothing_is_said_of_labels_where_the_factor_of_the_loss_has_a_meaning(tmp_path: Path) -> None:
    def edited(path: Path, factor: float) -> Path:
        torch.manual_seed(0)
        model = nn.Linear(6, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with traindiff.record(path, model, optimizer):
            loss: Tensor = model(torch.randn(16, 6)).square().mean() * factor
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return path

    first = first_of(edited(tmp_path / "whole", 1.0), edited(tmp_path / "half", 0.5))

    assert first.message == "The candidate's is 0.5 x the baseline's (= 1/2)."
