"""Samples that a distributed sampler hands out in turn, and batches that differ in size between ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import traindiff
from tests.observe.sharding.training import BATCH, LENGTH, VOCABULARY, Model, rank_and_size
from tests.on_ranks import run_on_ranks


def train(path: str, order: str, sizes: tuple[int, ...] = (), wrong_rank: int | None = None) -> None:
    """Rank r of W has the samples r, r + W, ...; or as many as `sizes` says, one rank after the other."""
    torch.manual_seed(0)
    model: nn.Module = Model()
    rank, size = rank_and_size()
    if size > 1:
        model = DistributedDataParallel(model)
    if rank == wrong_rank:
        next(m for name, m in model.named_modules() if name.endswith("blocks.1.act")).register_forward_hook(shifted)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(1)
    with traindiff.record(path, model, optimizer, strict=True, sample_order=order):
        for _ in range(2):
            tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=data)
            mine = tokens.split(sizes)[rank] if sizes else tokens[rank::size]
            logits = model(mine[:, :-1])
            functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()


def shifted(_module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output + 0.01


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "run"
    train(str(path), "blocks")
    return path


@pytest.mark.parametrize("world_size", [2, 4])
def test_samples_in_turn_are_put_in_their_places(world_size: int, reference: Path, tmp_path: Path) -> None:
    run_on_ranks(train, world_size, str(tmp_path / "run"), "interleaved")

    comparison = traindiff.compare(reference, tmp_path / "run")

    assert comparison.verdict == "equivalent", str(comparison)
    assert not comparison.representation
    assert not any(comparison.unaligned)


def test_a_fault_in_the_forward_pass_is_found_where_it_is(reference: Path, tmp_path: Path) -> None:
    run_on_ranks(train, 2, str(tmp_path / "run"), "interleaved", (), 1)

    first = traindiff.compare(reference, tmp_path / "run").first_divergence

    assert first is not None
    assert (first.step, first.phase, first.path) == (0, "forward", "blocks.1.act")


@pytest.mark.parametrize("sizes", [(5, 3), (3, 5)])
def test_batches_of_different_sizes_are_not_compared_sample_by_sample(
    sizes: tuple[int, ...], reference: Path, tmp_path: Path
) -> None:
    run_on_ranks(train, 2, str(tmp_path / "run"), "blocks", sizes)

    comparison = traindiff.compare(reference, tmp_path / "run")

    assert not any(finding.phase in ("batch", "forward") for finding in comparison.findings), str(comparison)
    reasons = ("batches of different sizes overlap", "batches differ in size")
    assert any(reason in note for note in comparison.notes for reason in reasons), str(comparison)


def test_another_order_is_named_with_what_brings_both_together(reference: Path, tmp_path: Path) -> None:
    run_on_ranks(train, 2, str(tmp_path / "run"), "blocks")

    comparison = traindiff.compare(reference, tmp_path / "run")

    assert comparison.verdict == "equivalent", str(comparison)  # what is learned is the same
    message = comparison.representation[0].message
    assert "of the baseline's, rank 0 has 0, 2, 4, 6, rank 1 has 1, 3, 5, 7, in turn" in message
    assert 'record it with sample_order="interleaved"' in message
