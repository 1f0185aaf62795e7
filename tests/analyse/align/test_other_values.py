"""Of a batch with other samples, a report says what its values are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import traindiff


def halved(x: Tensor) -> Tensor:
    return x * 0.5


def slightly_larger(x: Tensor) -> Tensor:
    return x * 1.0001


def mirrored(x: Tensor) -> Tensor:
    return x.flip(-1)


def cut(x: Tensor) -> Tensor:
    return x[:, :-2]


def broken(x: Tensor) -> Tensor:
    return torch.where(x == x[1, 2, 0], float("nan"), x)


def shifted(x: Tensor) -> Tensor:
    return x + 0.5


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (halved, "It is 0.5 x the baseline's."),
        (slightly_larger, "It is (1 + 0.0001) x the baseline's."),
        (mirrored, "The values are the same, in another order."),
        (cut, "has shape [8, 6, 5] in the baseline, [8, 4, 5] in the candidate."),
        (broken, "NaN and infinities: 1 of its elements, 0 of the baseline's."),
        (shifted, "of the baseline's size (relative L2)."),
    ],
)
def test_values_of_another_batch_are_described(change: Callable[[Tensor], Tensor], told: str, tmp_path: Path) -> None:
    paths = []
    for name in ("plain", "changed"):
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with traindiff.record(tmp_path / name, model, optimizer):
            x = torch.randn(8, 6, 5)
            model(change(x) if name == "changed" else x).square().mean().backward()
            optimizer.step()
        paths.append(tmp_path / name)

    first = traindiff.compare(*paths).first_divergence

    assert first is not None
    assert first.kind == "batch"
    assert first.message.endswith(told)
