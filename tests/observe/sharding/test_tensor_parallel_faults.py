"""What goes wrong between tensor-parallel ranks is located."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

import traindiff
from tests.observe.sharding.equivalence import assert_equivalent
from tests.observe.sharding.tensor_parallel import reduce_norms, with_copies, with_plain_norms
from tests.observe.sharding.transformer import Transformer, train
from tests.on_ranks import run_on_ranks


def forget_one(model: nn.Module) -> None:
    reduce_norms(model, "blocks.1.ffn_norm.weight")


def train_forgetting_one(path: str) -> None:
    train(path, with_plain_norms, before_step=forget_one)


def clip(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad *= 0.5


def clip_only_parts_elsewhere(model: nn.Module) -> None:
    """Beyond rank 0, what ranks hold copies of is not clipped."""
    for name, parameter in model.named_parameters():
        if "norm" not in name or distributed.get_rank() == 0:
            parameter.grad *= 0.5


def train_clipped(path: str) -> None:
    train(path, before_step=clip)


def train_clipping_only_parts(path: str) -> None:
    train(path, with_copies, before_step=clip_only_parts_elsewhere)


def with_dropout() -> nn.Module:
    return Transformer(dropout=0.25)


def draw_on_rank_1(_model: nn.Module) -> None:
    if distributed.is_initialized() and distributed.get_rank() == 1:
        torch.rand(1)


def train_with_dropout(path: str, prepare: Any = lambda model: model) -> None:
    train(path, prepare, model=with_dropout)


def train_drawing_on_rank_1(path: str) -> None:
    train(path, with_copies, model=with_dropout, before_step=draw_on_rank_1)


def test_a_norm_whose_gradient_is_not_reduced_under_sequence_parallelism(tmp_path: Path) -> None:
    train(tmp_path / "reference")
    run_on_ranks(train_forgetting_one, 2, str(tmp_path / "run"))

    comparison = traindiff.compare(tmp_path / "reference", tmp_path / "run")
    first = comparison.first_divergence
    assert first is not None
    assert (first.kind, first.step, first.phase, first.path) == (
        "ranks-disagree", 0, "grad", "blocks.1.ffn_norm.weight",
    ), str(comparison)  # fmt: skip


def test_copies_that_are_clipped_on_rank_0_only(tmp_path: Path) -> None:
    train_clipped(str(tmp_path / "reference"))
    run_on_ranks(train_clipping_only_parts, 2, str(tmp_path / "run"))

    comparison = traindiff.compare(tmp_path / "reference", tmp_path / "run")
    first = comparison.first_divergence
    assert first is not None
    assert (first.kind, first.step, first.phase, first.path) == (
        "ranks-disagree", 0, "grad", "blocks.0.attention_norm.weight",
    ), str(comparison)  # fmt: skip


def test_random_state_that_is_used_on_one_rank_only(tmp_path: Path) -> None:
    train_with_dropout(str(tmp_path / "reference"))
    run_on_ranks(train_with_dropout, 2, str(tmp_path / "legal"), with_copies)
    run_on_ranks(train_drawing_on_rank_1, 2, str(tmp_path / "run"))

    assert_equivalent(tmp_path / "reference", tmp_path / "legal")
    comparison = traindiff.compare(tmp_path / "reference", tmp_path / "run")
    first = comparison.first_divergence
    assert first is not None
    assert (first.step, first.phase, first.path) == (1, "batch", "rng"), str(comparison)
    assert "rank 1" in first.message
