"""Histograms of binary exponents on a page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import traindiff
from traindiff.present.page import page_of
from traindiff.present.page.sites import histograms


def trained(path: Path, *, scale: float = 1.0, detail: str = "exponents") -> Path:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with traindiff.record(path, model, optimizer, detail=detail):
        for seed in range(3):
            inputs = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed)) * scale
            model(inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


@pytest.fixture
def row_of() -> tuple[str, str]:
    return "forward", "0"


def test_both_runs_have_the_histogram_of_the_step_that_is_shown(tmp_path: Path, row_of: tuple[str, str]) -> None:
    result = traindiff.compare(trained(tmp_path / "b"), trained(tmp_path / "c", scale=4.0), history=True)
    data = page_of(result).data
    rows = data["rows"]
    at = next(at for at in range(len(rows["path"])) if (rows["phase"][at], rows["path"][at]) == row_of)
    held = data["histograms"][at]

    assert [sum(counts) for counts in held["counts"]] == [5 * 16, 5 * 16]
    first, second = (
        sum(k * n for k, n in enumerate(counts)) / sum(counts) + held["first"] for counts in held["counts"]
    )
    assert 1.0 < second - first < 3.0  # four times as large: two powers of two, but for the bias


def test_recordings_without_histograms_have_none(tmp_path: Path) -> None:
    paths = trained(tmp_path / "b"), trained(tmp_path / "c", detail="summary")

    assert page_of(traindiff.compare(*paths, history=True)).data["histograms"] == {}
    assert page_of(traindiff.check(paths[0], history=True)).data["histograms"] != {}
    assert histograms([str(tmp_path / "nowhere")], ()) == {}
