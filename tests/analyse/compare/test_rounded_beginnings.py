"""Parameters that start with values that rounding parts, as where they are computed from the first batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import traindiff


class Scaled(nn.Module):
    """A scale and a shift that the first batch determines, as in flows (ActNorm)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("begun", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        if not self.begun > 0.0:
            self.scale.data = -x.std(0).log().detach()
            self.shift.data = (-x.mean(0) * self.scale.exp()).detach()
            self.begun = torch.tensor(1.0)
        return x * self.scale.exp() + self.shift


class Flow(nn.Module):
    """Layers that a loss of their own calls without the hooks of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.scaled = nn.Linear(16, 16), Scaled(16)

    def loss(self, x: Tensor, *, other_order: bool) -> Tensor:
        weight = self.mixed.weight
        mixed = (weight.flip(1) @ x.flip(1).t()).t() if other_order else x @ weight.t()
        whole: Tensor = self.scaled.forward((mixed + self.mixed.bias).tanh())
        return whole.square().sum(-1).mean() / 2.0 - self.scaled.scale.sum()


def trained(
    path: Path, *, other_order: bool = False, gradient: float = 1.0, beginning: float = 1.0, replica: str | None = None
) -> Path:
    torch.manual_seed(0)
    model = Flow()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(1)
    with torch.no_grad():
        model.loss(torch.randn(64, 16, generator=data), other_order=other_order)
        model.scaled.scale *= beginning
    with traindiff.record(path, model, optimizer, replica=replica):
        for _ in range(4):
            optimizer.zero_grad()
            model.loss(torch.randn(64, 16, generator=data), other_order=other_order).backward()
            assert model.scaled.scale.grad is not None
            model.scaled.scale.grad *= gradient
            optimizer.step()
    return path


def test_beginnings_that_rounding_parts_are_judged_and_named(tmp_path: Path) -> None:
    baseline = trained(tmp_path / "baseline")

    comparison = traindiff.compare(baseline, trained(tmp_path / "candidate", other_order=True))

    assert comparison.verdict == "equivalent", str(comparison)
    assert "rounding alone parts scaled.scale and 1 more" in " ".join(comparison.notes)


def test_replicas_may_begin_with_other_roundings(tmp_path: Path) -> None:
    baseline = trained(tmp_path / "baseline")
    noise = [trained(tmp_path / f"{seed}", replica=f"ulp:{seed}", other_order=True) for seed in (1, 2)]

    comparison = traindiff.compare(baseline, trained(tmp_path / "candidate", other_order=True), noise=noise)

    assert comparison.calibrated
    assert comparison.verdict == "equivalent", str(comparison)


@pytest.mark.parametrize("factor", [0.99, 1.01, 2.0])
def test_a_wrong_gradient_is_found_behind_them(factor: float, tmp_path: Path) -> None:
    candidate = trained(tmp_path / "candidate", other_order=True, gradient=factor)

    first = traindiff.compare(trained(tmp_path / "baseline"), candidate).first_divergence

    assert first is not None
    assert (first.step, first.phase, first.path) == (0, "grad", "scaled.scale")


@pytest.mark.parametrize("factor", [1.01, 1.00001])
def test_other_values_than_rounding_makes_are_misaligned(factor: float, tmp_path: Path) -> None:
    candidate = trained(tmp_path / "candidate", other_order=True, beginning=factor)

    comparison = traindiff.compare(trained(tmp_path / "baseline"), candidate)

    assert comparison.verdict == "misaligned", str(comparison)
    assert [one.path for one in comparison.findings if one.kind == "initial-parameter"] == ["scaled.scale"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_short_dtypes_it_is_not_known_what_rounding_makes(dtype: torch.dtype, tmp_path: Path) -> None:
    for name, factor in (("baseline", 1.0), ("candidate", 1.1)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 8)).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        with torch.no_grad():
            model[0].weight[3] *= factor  # 0.6 percent of the whole
        with traindiff.record(tmp_path / name, model, optimizer):
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.randn(8, 16, dtype=dtype)).square().mean().backward()
                optimizer.step()

    comparison = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate")

    assert comparison.verdict == "misaligned", str(comparison)
