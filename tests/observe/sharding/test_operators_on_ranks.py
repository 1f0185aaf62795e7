"""Operators on several ranks: each rank's own are recorded, and held against those of the same rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn

import traindiff
from tests.observe.sharding.prepared import in_ddp, in_fsdp2, in_tensor_parallel
from tests.observe.sharding.training import Model, train
from tests.on_ranks import run_on_ranks
from traindiff.core.observation import OPERATOR
from traindiff.storage import open_recording

Prepare = Callable[[Model], nn.Module]


def alone(model: Model) -> nn.Module:
    return model


class OtherGelu(nn.Module):
    """Wrong on rank 1 only."""

    def forward(self, x: Tensor) -> Tensor:
        how = "tanh" if distributed.get_rank() == 1 else "none"
        return nn.functional.gelu(x, approximate=how)


def wrong_on_rank_1(model: Model) -> nn.Module:
    model.blocks[1].act = OtherGelu()  # type: ignore[assignment]
    return in_ddp(model)


def recorded(path: str, prepare: Prepare, zoomed: str | None = "blocks.1", shares: bool = True) -> list[bytes]:
    """Trains on this rank; gives back the bits of its parameters."""
    kept: list[nn.Module] = []

    def prepared(model: Model) -> nn.Module:
        kept.append(prepare(model))
        return kept[0]

    train(path, prepared, steps=2, shares=shares, operators=zoomed)
    local = (one.to_local() if hasattr(one, "to_local") else one for one in kept[0].parameters())
    return [one.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for one in local]


def operators(path: Path, rank: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """Path, slot and local shape of what a rank has recorded of operators in step 0."""
    first = next(iter(open_recording(str(path)).steps(rank)))
    found = [seen for seen in first.observations if seen.stage == OPERATOR and not seen.unobserved]
    return [(seen.path, seen.slot, seen.shard.shape) for seen in found]


@pytest.mark.parametrize("prepare", [in_ddp, in_fsdp2, in_tensor_parallel])
def test_each_rank_records_its_own_operators_and_trains_the_same_bits(prepare: Prepare, tmp_path: Path) -> None:
    shares = prepare is not in_tensor_parallel
    plain = run_on_ranks(recorded, 2, str(tmp_path / "plain"), prepare, None, shares)
    zoomed = run_on_ranks(recorded, 2, str(tmp_path / "zoomed"), prepare, "blocks.1", shares)

    assert zoomed == plain
    for rank in (0, 1):
        paths = [path for path, *_ in operators(tmp_path / "zoomed", rank)]
        assert "blocks.1.norm/aten.native_layer_norm[0]" in paths
        assert any(path.startswith("blocks.1.up/aten.addmm") for path in paths)
        assert any(path.startswith("blocks.1.down/aten.mm") for path in paths)  # of the backward pass
        assert all(path.startswith("blocks.1") for path in paths)


def test_what_a_rank_holds_of_a_distributed_tensor_is_what_is_recorded_of_its_operators(tmp_path: Path) -> None:
    run_on_ranks(recorded, 2, str(tmp_path / "run"), in_tensor_parallel, "blocks.1", False)

    outputs = {(path, slot): shape for path, slot, shape in operators(tmp_path / "run", 0)}
    assert outputs["blocks.1.up/aten.addmm[0]", "output[0]"] == (48, 32)  # half of 64 features


def test_a_fault_on_one_rank_is_found_in_the_operators_of_that_rank(tmp_path: Path) -> None:
    run_on_ranks(recorded, 2, str(tmp_path / "baseline"), in_ddp)
    run_on_ranks(recorded, 2, str(tmp_path / "candidate"), wrong_on_rank_1)

    comparison = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate")

    first = comparison.first_divergence
    assert first is not None
    assert (first.path, first.rank) == ("blocks.1.act", 1)
    zoom = comparison.zooms[0]
    assert (zoom.rank, zoom.cause, zoom.operator) == (1, "operator", "blocks.1.act/aten.gelu[0]")
    assert "approximate = left out in the baseline, tanh in the candidate" in zoom.message


def test_operators_of_another_number_of_ranks_are_not_taken_for_a_difference(tmp_path: Path) -> None:
    recorded(str(tmp_path / "baseline"), alone)
    run_on_ranks(recorded, 2, str(tmp_path / "candidate"), in_ddp)

    comparison = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate")

    assert comparison.verdict == "equivalent", str(comparison)
    assert comparison.zooms == ()
