"""Tensor and sequence parallelism by `parallelize_module` against one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

import traindiff
from tests.engines.transformer import cross_entropy, train, world_size
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


def in_two_dimensions(model: nn.Module) -> nn.Module:
    """Two data-parallel ranks by FSDP2, times two tensor-parallel ones."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sequence_parallel(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def in_ddp_and_tp(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    without_sequence(model, mesh["tp"])
    _pre_dp_module_transform(model)
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def half_of_the_batch() -> tuple[int, int]:
    return torch.distributed.get_rank() // 2, 2


def train_in_two_dimensions(path: str) -> None:
    train(path, in_two_dimensions, share=half_of_the_batch)


def train_in_ddp_and_tp(path: str) -> None:
    train(path, in_ddp_and_tp, share=half_of_the_batch)


def with_a_local_head(model: nn.Module) -> nn.Module:
    mesh = tp_mesh()
    sequence_parallel(model, mesh)
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    model.head = nn.Linear(model.head.in_features, model.head.out_features, bias=False)
    torch.manual_seed(0)
    return parallelize_module(model, mesh, {"head": head})


def loss_in_parts(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    return cross_entropy(logits_BTV, labels_BT)


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


@pytest.mark.parametrize("training", [train_in_two_dimensions, train_in_ddp_and_tp])
def test_tensor_parallelism_beside_data_parallelism_is_equivalent_to_one_process(
    training, reference: Path, tmp_path: Path
) -> None:
    run_on_ranks(training, 4, str(tmp_path / "run"))

    assert_equivalent(reference, tmp_path / "run")
