"""Context parallelism by hand: each rank has a part of every sequence, and attention gathers keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import traindiff
from tests.observe.sharding.equivalence import assert_equivalent
from tests.observe.sharding.transformer import (
    BATCH,
    HEADS,
    LENGTH,
    VOCABULARY,
    WIDTH,
    FeedForward,
    cross_entropy,
    world_size,
)
from tests.on_ranks import run_on_ranks


class GatherSequence(torch.autograd.Function):
    """Forward the parts of all ranks along dim 1, backward the sum of what all ranks have for this rank's part."""

    @staticmethod
    def forward(ctx: Any, part_BTD: Tensor) -> Tensor:
        parts = [torch.empty_like(part_BTD) for _ in range(world_size())]
        distributed.all_gather(parts, part_BTD.contiguous())
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, gradient_BTD: Tensor) -> Tensor:
        gradient_BTD = gradient_BTD.contiguous()
        distributed.all_reduce(gradient_BTD)
        return gradient_BTD.chunk(world_size(), dim=1)[distributed.get_rank()]


def first_position(length: int) -> int:
    return distributed.get_rank() * length if distributed.is_initialized() else 0


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BTD, k_BTD, v_BTD = self.wq(x_BTD), self.wk(x_BTD), self.wv(x_BTD)
        if world_size() > 1:
            k_BTD, v_BTD = GatherSequence.apply(k_BTD), GatherSequence.apply(v_BTD)
        q_BHTK, k_BHTK, v_BHTK = (t.unflatten(2, (HEADS, -1)).transpose(1, 2) for t in (q_BTD, k_BTD, v_BTD))
        rows = torch.arange(x_BTD.shape[1]) + first_position(x_BTD.shape[1])
        mask = rows[:, None] >= torch.arange(k_BTD.shape[1])
        mixed_BHTK = functional.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, attn_mask=mask)
        return self.wo(mixed_BHTK.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """With `restarting`, every rank counts positions from 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm, self.attention, self.feed_forward = nn.LayerNorm(WIDTH), Attention(), FeedForward()
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.restarting = False

    def forward(self, tokens_BT: Tensor) -> Tensor:
        length = tokens_BT.shape[1]
        first = 0 if self.restarting else first_position(length)
        x_BTD = self.embed(tokens_BT) + self.positions(torch.arange(first, first + length))
        x_BTD = x_BTD + self.attention(self.norm(x_BTD))
        y_ND = self.feed_forward(x_BTD.flatten(0, 1))  # N: tokens of all samples
        return self.head(x_BTD + y_ND.unflatten(0, (-1, length)))


def shards() -> Sequence[Any]:
    axis = distributed.group.WORLD
    return [traindiff.shard("positions", dim=0, axis=axis), traindiff.shard("(root)", dim=1, axis=axis)]


def in_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def average(model: nn.Module) -> None:
    if world_size() > 1:
        for parameter in model.parameters():
            distributed.all_reduce(parameter.grad)
            parameter.grad /= world_size()


def train(
    path: str,
    prepare: Callable[[nn.Module], nn.Module] | None = None,
    *,
    loss_scale: float = 1.0,
    restarting: bool = False,
) -> None:
    """By DDP over the ranks that share the sequences where `prepare` says so, else averaged by hand."""
    torch.manual_seed(0)
    model = Model()
    model.restarting = restarting
    wrapped = prepare(model) if prepare else model
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    rank = distributed.get_rank() if distributed.is_initialized() else 0
    data = torch.Generator().manual_seed(1)
    declared = shards() if distributed.is_initialized() else ()
    with traindiff.record(path, wrapped, optimizer, strict=True, shards=declared):
        for _ in range(2):
            tokens_BT = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=data)
            inputs_BT = tokens_BT[:, :-1].chunk(world_size(), dim=1)[rank]
            labels_BT = tokens_BT[:, 1:].chunk(world_size(), dim=1)[rank]
            (cross_entropy(wrapped(inputs_BT), labels_BT) * loss_scale).backward()
            if prepare is None:
                average(wrapped)
            optimizer.step()
            optimizer.zero_grad()


def train_normalized_locally(path: str) -> None:
    """The loss is divided by the number of ranks, and then the gradients are averaged over them."""
    train(path, in_ddp, loss_scale=1 / world_size())


def train_with_restarting_positions(path: str) -> None:
    train(path, in_ddp, restarting=True)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "run"
    train(str(path))
    return path


@pytest.mark.parametrize(("prepare", "ranks"), [(in_ddp, 2), (None, 2), (in_ddp, 4)])
def test_context_parallelism_is_equivalent_to_one_process(
    prepare: Any, ranks: int, reference: Path, tmp_path: Path
) -> None:
    run_on_ranks(train, ranks, str(tmp_path / "run"), prepare)

    assert_equivalent(reference, tmp_path / "run")


def test_a_loss_that_is_normalized_on_each_rank_halves_everything(reference: Path, tmp_path: Path) -> None:
    run_on_ranks(train_normalized_locally, 2, str(tmp_path / "run"))

    comparison = traindiff.compare(reference, tmp_path / "run")
    first = comparison.first_divergence
    assert first is not None
    assert (first.kind, first.step, first.phase) == ("scale", 0, "loss"), str(comparison)
    assert "0.5 x" in first.message


def test_positions_that_restart_on_each_rank_are_located(reference: Path, tmp_path: Path) -> None:
    run_on_ranks(train_with_restarting_positions, 2, str(tmp_path / "run"))

    comparison = traindiff.compare(reference, tmp_path / "run")
    first = comparison.first_divergence
    assert first is not None
    assert (first.step, first.phase, first.path, first.rank) == (0, "forward", "positions", 1), str(comparison)
