"""Tensor and sequence parallelism by `parallelize_module` against one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import traindiff
from tests.engines.transformer import train, world_size
from traindiff.sessions.ranks import run_on_ranks


def tp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (world_size(),), mesh_dim_names=("tp",))


def sequence_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """As torchtitan does: between attention and MLP, ranks have parts of the sequence."""
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "feed_forward.up": ColwiseParallel(),
                "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    return model


def without_sequence(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Norms and residual stream are copies on all ranks."""
    parallelize_module(
        model,
        mesh,
        {"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())},
    )
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(),
                "feed_forward.up": ColwiseParallel(),
                "feed_forward.down": RowwiseParallel(),
            },
        )
    return model


def with_sequence_parallelism(model: nn.Module) -> nn.Module:
    return sequence_parallel(model, tp_mesh())


def with_copies(model: nn.Module) -> nn.Module:
    return without_sequence(model, tp_mesh())


def train_bfloat16(path: str, prepare=lambda model: model) -> None:
    train(path, prepare, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "run"
    train(path)
    return path


def assert_equivalent(baseline: Path, candidate: Path) -> None:
    comparison = traindiff.compare(baseline, candidate)
    assert comparison.verdict == "equivalent", str(comparison)
    assert not any(comparison.unaligned)
    everything = traindiff.compare(baseline, baseline).differences
    compared = {(row.phase, row.path, row.slot) for row in comparison.differences}
    assert {(row.phase, row.path, row.slot) for row in everything} == compared


@pytest.mark.parametrize("prepare", [with_sequence_parallelism, with_copies])
@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallelism_is_equivalent_to_one_process(prepare, ranks: int, reference: Path, tmp_path: Path) -> None:
    run_on_ranks(train, ranks, str(tmp_path / "run"), prepare)

    assert_equivalent(reference, tmp_path / "run")
