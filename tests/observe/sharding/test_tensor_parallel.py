"""Tensor and sequence parallelism by `parallelize_module` against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    loss_parallel,
)
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import traindiff
from tests.observe.sharding.equivalence import assert_equivalent
from tests.observe.sharding.tensor_parallel import (
    reduce_norms,
    sequence_parallel,
    tp_mesh,
    with_copies,
    with_plain_norms,
    with_sequence_parallelism,
    without_sequence,
)
from tests.observe.sharding.transformer import HEADS, WIDTH, Attention, Transformer, train
from tests.on_ranks import run_on_ranks


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


def train_with_plain_norms(path: str) -> None:
    train(path, with_plain_norms, before_step=reduce_norms)


class Rotary(Attention):
    """Rotary embeddings by complex numbers, and two queries for each key, as in Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.wk, self.wv = (nn.Linear(WIDTH, WIDTH // 2, bias=False) for _ in range(2))

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (w(x_BTD).unflatten(2, (-1, WIDTH // HEADS)) for w in (self.wq, self.wk, self.wv))
        q, k, v = rotated(q), repeated(rotated(k)), repeated(v)
        mixed = self.core(*(heads.transpose(1, 2) for heads in (q, k, v)))
        return self.wo(mixed.transpose(1, 2).contiguous().view(*x_BTD.shape[:2], -1))


def rotated(x_BTHK: Tensor) -> Tensor:
    angles = torch.arange(x_BTHK.shape[1])[:, None, None] * torch.tensor([1.0, 0.1])
    pairs = torch.view_as_complex(x_BTHK.float().reshape(*x_BTHK.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones(()), angles)).flatten(3).type_as(x_BTHK)


def repeated(x_BTHK: Tensor) -> Tensor:
    return x_BTHK[:, :, :, None, :].expand(-1, -1, -1, 2, -1).flatten(2, 3)


class Llama(Transformer):
    """With 21 words, which ranks divide unevenly, and layers that are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(21, WIDTH), nn.Linear(WIDTH, 21, bias=False)
        for block in self.blocks:
            block.attention = Rotary()

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTD = checkpoint(block, x_BTD, use_reentrant=False)
        return self.head(self.norm(x_BTD))


def train_llama(path: str, prepare: Any = lambda model: model) -> None:
    train(path, prepare, model=Llama)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "run"
    train(path)
    return path


@pytest.mark.parametrize(
    ("prepare", "ranks"), [(with_sequence_parallelism, 2), (with_copies, 2), (with_sequence_parallelism, 4)]
)
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


def test_rotary_embeddings_shared_keys_and_recomputation_are_equivalent_to_one_process(tmp_path: Path) -> None:
    train_llama(str(tmp_path / "reference"))
    run_on_ranks(train_llama, 2, str(tmp_path / "run"), with_sequence_parallelism)

    assert_equivalent(tmp_path / "reference", tmp_path / "run")
