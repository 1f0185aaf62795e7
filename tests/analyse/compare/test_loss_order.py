"""Two losses of one step, on which `backward` is called in another order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

import traindiff


def trained(path: Path, *, second_first: bool = False, micro_batches: int = 1, swapped: int = -1) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with traindiff.record(path, model, optimizer):
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            x, y = torch.randn(12, 6, generator=generator), torch.arange(12) % 4
            y = y.roll(1) if step == swapped else y
            for some, their in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
                out = model(some)
                losses = [cross_entropy(out, their), 0.3 * mse_loss(out, torch.ones_like(out))]
                torch.autograd.backward(losses[::-1] if second_first else losses)
            optimizer.step()
            optimizer.zero_grad()
    return path


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_same_losses_in_another_order_have_the_same_bits(micro_batches: int, tmp_path: Path) -> None:
    sides = [trained(tmp_path / f"{order}", second_first=order, micro_batches=micro_batches) for order in (False, True)]
    found = traindiff.compare(*sides)

    assert (found.findings, found.verdict in ("identical", "equivalent")) == ((), True)
    assert found.first_bit_difference is None or found.first_bit_difference.phase != "loss"
    assert "like 0 and -0" not in str(found)


def test_a_fault_in_losses_of_another_order_is_found_at_the_loss(tmp_path: Path) -> None:
    first = traindiff.compare(
        trained(tmp_path / "b"), trained(tmp_path / "c", second_first=True, swapped=2)
    ).first_divergence

    assert first is not None
    assert (first.step, first.phase) == (2, "loss")
