"""Sharded models: their checkpoints are read whole, and models in memory are compared by what each rank holds."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, distributed, nn

import traindiff
from tests.on_ranks import run_on_ranks
from traindiff.errors import CheckpointError

ENGINES = ("fsdp2", "hsdp", "fsdp1", "fsdp1 with its own parameters", "tensor parallel")


def model() -> nn.Module:
    """Of sizes that no number of ranks divides, but for the first and last matrix; with a buffer."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 7), nn.BatchNorm1d(7), nn.Linear(7, 3, bias=False))


def wrapped(engine: str) -> nn.Module:
    whole, size = model(), distributed.get_world_size()
    if engine == "tensor parallel":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = distributed.init_device_mesh("cpu", (size,))
        plan: Any = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        return parallelize_module(whole, mesh, plan)
    if engine.startswith("fsdp1"):
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(whole, use_orig_params="own" in engine, device_id=torch.device("cpu"))
    from torch.distributed.fsdp import fully_shard

    axes = (2, size // 2) if engine == "hsdp" else (size,)
    names = ("copies", "shards") if engine == "hsdp" else ("shards",)
    mesh = distributed.init_device_mesh("cpu", axes, mesh_dim_names=names)
    fully_shard(whole[0], mesh=mesh)  # type: ignore[index]
    fully_shard(whole, mesh=mesh)
    return whole


def alone(sharded: nn.Module, directory: Path) -> list[Any]:
    """What a rank is told by itself."""
    same = traindiff.weights(str(directory / "whole.pt"), sharded)
    turned = traindiff.weights(sharded, str(directory / "whole.pt"))
    other = traindiff.weights(str(directory / "other.pt"), sharded)
    return [same.verdict, turned.verdict, other.verdict, [one.name for one in other.differences], list(same.notes)]


def compared(engine: str, directory: str) -> list[Any]:
    """Compare with the whole model on each rank, one after the other, so that none could call a collective."""
    warnings.simplefilter("ignore")
    sharded, found = wrapped(engine), []
    for rank in range(distributed.get_world_size()):
        if rank == distributed.get_rank():
            found = alone(sharded, Path(directory))
        distributed.barrier()
    return found


@pytest.mark.parametrize("engine", ENGINES)
def test_a_rank_compares_what_it_holds_by_itself(tmp_path: Path, engine: str) -> None:
    state = model().state_dict()
    torch.save(state, tmp_path / "whole.pt")
    changed = state["0.weight"].clone()
    changed[1, 2] += 1  # an element that the first rank holds
    torch.save({**state, "0.weight": changed}, tmp_path / "other.pt")

    ranks = run_on_ranks(compared, 2, engine, str(tmp_path))

    assert [one[:2] for one in ranks] == [["identical", "identical"]] * 2
    holds_all = engine == "hsdp"  # one shard, two copies
    assert [one[2] for one in ranks] == ["diverged", "diverged" if holds_all else "identical"]
    assert [one[3] for one in ranks] == [["0.weight"], ["0.weight"] if holds_all else []]
    assert all(bool(one[4]) is not holds_all for one in ranks)
    assert holds_all or "only the elements that this rank holds are compared" in ranks[0][4][0]


def saved(engine: str, directory: str) -> None:
    """Train, and save as each engine saves: sharded, with the optimizer's state."""
    warnings.simplefilter("ignore")
    sharded = wrapped(engine)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    for step in range(2):
        batch: Tensor = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        sharded(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if engine.startswith("fsdp1"):
        from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

        with FullyShardedDataParallel.state_dict_type(sharded, StateDictType.SHARDED_STATE_DICT):
            state = {
                "model": sharded.state_dict(),
                "optimizer": FullyShardedDataParallel.optim_state_dict(sharded, optimizer),
            }
    else:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        own, held = get_state_dict(sharded, optimizer)
        assert traindiff.weights(sharded, own).verdict == "identical"
        state = {"model": own, "optimizer": held}
    dcp.save(state, checkpoint_id=f"{directory}/{engine}")
    assert traindiff.weights(f"{directory}/{engine}", sharded).verdict == "identical"
    live = traindiff.weights(f"{directory}/{engine}", state)
    assert live.verdict == "identical"
    assert {one.role for one in live.relations} >= {"parameter", "optimizer"}


@pytest.mark.parametrize("ranks", [2, 4])
def test_sharded_checkpoints_are_the_model_of_one_rank(tmp_path: Path, ranks: int) -> None:
    """All ranks have the same batch, so that they train the model as one rank does."""
    engines = ("fsdp2", "hsdp", "fsdp1")
    for engine in engines:
        run_on_ranks(saved, ranks, engine, str(tmp_path))

    for engine in engines:
        found = traindiff.weights(tmp_path / "fsdp2", tmp_path / engine)
        assert found.verdict == "identical", str(found)
        assert {one.role for one in found.relations} >= {"parameter", "optimizer"}


def test_two_ways_of_sharding_are_refused_in_memory() -> None:
    assert run_on_ranks(refused, 2) == [True, True]


def refused() -> bool:
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = distributed.init_device_mesh("cpu", (2,))
    rows, columns = (distribute_tensor(torch.ones(4, 4), mesh, [Shard(dim)]) for dim in (0, 1))
    with pytest.raises(CheckpointError, match="holds other elements of the two"):
        traindiff.weights({"weight": rows}, {"weight": columns})
    return True
