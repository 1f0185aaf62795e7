"""Losses and gradients of models of which nothing, or a part, was recorded inside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import traindiff

ONLY_RESULTS = ("loss", "grad", "param")
OUTPUTS = (*ONLY_RESULTS, "forward")
ALL = (*OUTPUTS, "backward")


class Halves(nn.Linear):
    """A linear layer whose sums are made of two halves: another order, so other roundings."""

    def forward(self, x: Tensor) -> Tensor:
        half = self.in_features // 2
        found = functional.linear(x[..., :half], self.weight[:, :half]) + functional.linear(
            x[..., half:], self.weight[:, half:]
        )
        return found if self.bias is None else found + self.bias


class Gated(nn.Module):
    """Layers with gates between them, in code and not as modules."""

    def __init__(self, layer: type[nn.Linear], depth: int = 4, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.relu(layer(x))
        return self.head(x)


class Unseen(Gated):
    """The same, but hooks of its layers are not called."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = functional.relu(layer.forward(x))
        return self.head(x)


def record(
    path: Path,
    observe: tuple[str, ...],
    *,
    layer: type[nn.Linear] = nn.Linear,
    model: type[Gated] = Gated,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    fault: Callable[[Gated], None] | None = None,
) -> Path:
    torch.manual_seed(0)
    trained = model(layer).to(dtype)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(1)
    with traindiff.record(path, trained, optimizer, observe=observe):
        for step in range(4):
            inputs = torch.randn(256, 64, generator=data).to(dtype)
            labels = torch.randint(5, (256,), generator=data)
            with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                loss = functional.cross_entropy(trained(inputs).float(), labels)
            loss.backward()
            if fault is not None and step == 1:
                fault(trained)
            optimizer.step()
            optimizer.zero_grad()
    return path


PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "autocast": {"autocast": torch.bfloat16},
}


@pytest.mark.parametrize("observe", [ONLY_RESULTS, OUTPUTS, ALL], ids=["results", "outputs", "all"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_another_order_of_sums_is_noise_whatever_is_recorded(
    precision: str, observe: tuple[str, ...], tmp_path: Path
) -> None:
    one = record(tmp_path / "one", observe, **PRECISIONS[precision])
    other = record(tmp_path / "other", observe, layer=Halves, **PRECISIONS[precision])

    assert traindiff.compare(one, other).verdict == "equivalent", str(traindiff.compare(one, other))


@pytest.mark.parametrize("observe", [OUTPUTS, ALL], ids=["outputs", "all"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("swapped", [False, True])
def test_what_one_run_alone_shows_is_noise_in_the_other(
    precision: str, observe: tuple[str, ...], swapped: bool, tmp_path: Path
) -> None:
    one = record(tmp_path / "one", observe, **PRECISIONS[precision])
    other = record(tmp_path / "other", observe, model=Unseen, layer=Halves, **PRECISIONS[precision])

    comparison = traindiff.compare(*((other, one) if swapped else (one, other)))

    assert comparison.first_divergence is None, str(comparison)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_neither_run_shows_is_noise(precision: str, tmp_path: Path) -> None:
    one = record(tmp_path / "one", ALL, model=Unseen, **PRECISIONS[precision])
    other = record(tmp_path / "other", ALL, model=Unseen, layer=Halves, **PRECISIONS[precision])

    comparison = traindiff.compare(one, other)

    assert comparison.first_divergence is None, str(comparison)


def of(path: str, change: Callable[[Tensor], None]) -> Callable[[Gated], None]:
    def apply(model: Gated) -> None:
        gradient = model.get_parameter(path).grad
        assert gradient is not None
        change(gradient)

    return apply


FAULTS: dict[str, tuple[str, Callable[[Tensor], None]]] = {
    "doubled": ("layers.1.weight", lambda gradient: gradient.mul_(2.0)),
    "lost": ("layers.2.bias", lambda gradient: gradient.zero_()),
    "flipped": ("layers.0.weight", lambda gradient: gradient.neg_()),
}


@pytest.mark.parametrize("observe", [ONLY_RESULTS, OUTPUTS, ALL], ids=["results", "outputs", "all"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_whatever_is_recorded(
    fault: str, precision: str, observe: tuple[str, ...], tmp_path: Path
) -> None:
    path, change = FAULTS[fault]
    one = record(tmp_path / "one", observe, **PRECISIONS[precision])
    other = record(tmp_path / "other", observe, layer=Halves, fault=of(path, change), **PRECISIONS[precision])

    first = traindiff.compare(one, other).first_divergence

    assert first is not None
    assert (first.step, first.phase, first.path) == (1, "grad", path)
