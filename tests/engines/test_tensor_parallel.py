"""Tensor and sequence parallelism by `parallelize_module` against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

import traindiff
from tests.engines.transformer import Transformer, train, world_size
from tests.taps.reading import rows
from traindiff.sessions.ranks import run_on_ranks


def tp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (world_size(),), mesh_dim_names=("tp",))


def sequence_parallel(
    model: nn.Module, mesh: DeviceMesh, *, head: Any = None, norm: Any = SequenceParallel
) -> nn.Module:
    """As torchtitan does: between attention and MLP, ranks have parts of the sequence."""
    norms = {} if norm is None else {"attention_norm": norm(), "ffn_norm": norm()}
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            **({} if norm is None else {"norm": norm()}),
            "head": head or ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                **norms,
                "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
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


def core_by_name() -> list[Any]:
    """What the graph tells as well, declared by the name of an axis that parameters know."""
    return [traindiff.shard("*.core", dim=1, axis="tp")]


def half_of_the_batch() -> tuple[int, int]:
    return torch.distributed.get_rank() // 2, 2


def train_in_two_dimensions(path: str) -> None:
    train(path, in_two_dimensions, share=half_of_the_batch, shards=core_by_name)


def train_in_ddp_and_tp(path: str) -> None:
    train(path, in_ddp_and_tp, share=half_of_the_batch)


def with_local_logits(model: nn.Module) -> nn.Module:
    """The vocabulary stays divided, up to the loss."""
    return sequence_parallel(model, tp_mesh(), head=ColwiseParallel(input_layouts=Shard(1), use_local_output=False))


def train_with_loss_parallel(path: str) -> None:
    train(path, with_local_logits, around=loss_parallel, shards=core_by_name)


def train_bfloat16(path: str, prepare: Any = lambda model: model) -> None:
    train(path, prepare, dtype=torch.bfloat16)


def with_plain_norms(model: nn.Module) -> nn.Module:
    """Norms work on parts of the sequence with plain parameters, of whose gradients every rank has a term."""
    return sequence_parallel(model, tp_mesh(), norm=None)


def reduce_norms(model: nn.Module, forgotten: str = "") -> None:
    for name, parameter in model.named_parameters():
        if "norm" in name and name != forgotten:
            distributed.all_reduce(parameter.grad)


def forget_one(model: nn.Module) -> None:
    reduce_norms(model, "blocks.1.ffn_norm.weight")


def train_with_plain_norms(path: str) -> None:
    train(path, with_plain_norms, before_step=reduce_norms)


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


def draw_on_rank_1(model: nn.Module) -> None:
    if distributed.is_initialized() and distributed.get_rank() == 1:
        torch.rand(1)


def train_with_dropout(path: str, prepare: Any = lambda model: model) -> None:
    train(path, prepare, model=with_dropout)


def train_drawing_on_rank_1(path: str) -> None:
    train(path, with_copies, model=with_dropout, before_step=draw_on_rank_1)


def waits(path: str) -> list[Any]:
    """What becomes of asynchronous collectives while they are observed, on one of two ranks."""
    torch.manual_seed(0)
    model = with_copies(Transformer())
    found: list[Any] = []

    def look(module: nn.Module, args: Any, output: Tensor) -> None:
        found.append([type(output).__name__, getattr(output, "completed", None)])

    with traindiff.record(path, model, strict=True):
        model.blocks[0].feed_forward.down.register_forward_hook(look)
        late = all_reduce_later()
        traindiff.inspect("overwritten", late)
        late.elem.add_(1.0)
        traindiff.inspect("unused", all_reduce_later())
        model(torch.zeros(2, 4, dtype=torch.int64)).sum().backward()
    return found


def all_reduce_later() -> Tensor:
    return functional_collectives.all_reduce(torch.ones(3), "sum", distributed.group.WORLD)


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


@pytest.mark.parametrize("training", [train_with_loss_parallel, train_with_plain_norms])
def test_parts_up_to_the_loss_and_norms_by_hand_are_equivalent_to_one_process(
    training: Any, reference: Path, tmp_path: Path
) -> None:
    run_on_ranks(training, 2, str(tmp_path / "run"))

    assert_equivalent(reference, tmp_path / "run")


def test_tensor_parallelism_in_bfloat16_is_equivalent_to_one_process(tmp_path: Path) -> None:
    train_bfloat16(str(tmp_path / "reference"))
    run_on_ranks(train_bfloat16, 2, str(tmp_path / "run"), with_sequence_parallelism)

    assert_equivalent(tmp_path / "reference", tmp_path / "run")


def test_a_norm_whose_gradient_is_not_reduced_under_sequence_parallelism(reference: Path, tmp_path: Path) -> None:
    run_on_ranks(train_forgetting_one, 2, str(tmp_path / "run"))

    comparison = traindiff.compare(reference, tmp_path / "run")
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
    assert "rank 1" in first.says


def test_a_collective_is_not_waited_for_in_order_to_be_observed(tmp_path: Path) -> None:
    found, _ = run_on_ranks(waits, 2, str(tmp_path / "run"))

    assert found == [["AsyncCollectiveTensor", False]]
    (seen,) = [seen for seen, _ in rows(tmp_path / "run", path="overwritten")]
    assert seen.unobserved == "it was written to before anybody waited for the collective that computes it"
    ((seen, summary),) = rows(tmp_path / "run", path="unused")
    assert not seen.unobserved
    assert summary["sum"] == 6.0
