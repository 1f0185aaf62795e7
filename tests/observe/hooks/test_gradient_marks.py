"""A bit that flips in a gradient is found with its step and parameter; whatever a training does is no flip."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import traindiff
from tests.observe.hooks.models import mlp
from traindiff.analyse.findings import Finding
from traindiff.observe.torch.hooks.marks import flipped_bit, mark_of

Change = Callable[[int, nn.Module], None]

INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}


def flip(tensor: torch.Tensor, place: int, bit: int) -> None:
    """Flip a bit as hardware does: no counter of writes sees it."""
    bits = tensor.detach().numpy().reshape(-1).view("u4")
    bits[place] ^= 1 << bit


def train(path: Path, change: Change, *, micro_batches: int = 1) -> list[Finding]:
    """Findings about four steps; `change` is called after each backward pass, with its number."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with traindiff.record(path, model, optimizer, observe=("grad", "witness"), strict=True):
        for step in range(4):
            for micro_step in range(micro_batches):
                model(torch.randn(4, 8)).square().sum().backward()
                change(step * micro_batches + micro_step, model)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    verdict = traindiff.check(path, rules="bit-flip,wrong-gradient")
    return [*verdict.findings, *verdict.warnings]


def weight(model: nn.Module) -> torch.Tensor:
    (found, *_) = (one for one in model.parameters() if one.dim() == 2)
    assert found.grad is not None
    return found.grad


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("bit", [3, 30])
def test_a_bit_that_flips_after_a_backward_pass_is_one_finding(bit: int, micro_batches: int, tmp_path: Path) -> None:
    def change(number: int, model: nn.Module) -> None:
        if number == 2 * micro_batches:
            flip(weight(model), 5, bit)

    (found,) = train(tmp_path / "run", change, micro_batches=micro_batches)

    assert (found.kind, found.step, found.path.rpartition(".")[2]) == ("bit-flip", 2, "weight")
    assert found.message.startswith(f"Bit {bit} of one element of the gradient changed in memory, after the backward")


def clipped(_: int, model: nn.Module) -> None:
    weight(model).data.clamp_(-1e-3, 1e-3)


def all_doubled(_: int, model: nn.Module) -> None:
    for one in model.parameters():
        assert one.grad is not None
        one.grad.data.mul_(2.0)


def one_doubled(_: int, model: nn.Module) -> None:
    weight(model)[0, 0] *= 2.0


def only_one_left_and_doubled(_: int, model: nn.Module) -> None:
    flat = weight(model).data.view(-1)
    flat[1:].zero_()
    flat[:1].mul_(2.0)


EDITS: dict[str, Change] = {
    "clipped through data": clipped, "all doubled through data": all_doubled, "one doubled": one_doubled,
    "only one left, and doubled": only_one_left_and_doubled, "nothing": lambda _, __: None,
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_what_a_training_writes_is_no_flip(name: str, tmp_path: Path) -> None:
    assert [one for one in train(tmp_path / "run", EDITS[name]) if one.kind == "bit-flip"] == []


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("count", [1, 17, 1024, 5003])
def test_the_bit_follows_from_two_marks(count: int, dtype: torch.dtype) -> None:
    choose = random.Random(count)
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)
    before, size = mark_of(tensor), 8 * tensor.element_size()
    assert before is not None
    for _ in range(20):
        other, bit = tensor.clone(), choose.randrange(size)
        one = -(1 << bit) if bit == size - 1 else 1 << bit
        other.view(INTEGERS[dtype])[choose.randrange(count)] ^= one
        now = mark_of(other)
        assert now is not None
        assert flipped_bit(before, now, tensor.nbytes, size) == bit


def test_more_than_one_bit_is_no_flip() -> None:
    tensor = torch.randn(5003, generator=torch.Generator().manual_seed(0))
    before, other = mark_of(tensor), mark_of(tensor * 2.0)
    assert before is not None
    assert other is not None
    assert flipped_bit(before, other, tensor.nbytes, 32) is None
    assert flipped_bit(before, before, tensor.nbytes, 32) is None
