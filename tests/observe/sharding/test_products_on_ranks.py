"""Products on several ranks: each rank checks its own, also those of distributed tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

import traindiff
from tests.observe.hooks.broken_products import Breaks, one_element
from tests.observe.sharding.prepared import in_ddp, in_fsdp2, in_tensor_parallel
from tests.observe.sharding.training import Model, train
from tests.on_ranks import run_on_ranks
from traindiff.storage import open_recording

Prepare = Callable[[Model], nn.Module]
EVERYTHING = ("forward", "grad", "param")


def recorded(path: str, prepare: Prepare, observe: tuple[str, ...], broken: int | None = None) -> list[bytes]:
    """Trains on this rank; gives back the bits of its parameters. On the rank `broken`, a kernel is wrong."""
    kept: list[nn.Module] = []

    def prepared(model: Model) -> nn.Module:
        kept.append(prepare(model))
        return kept[0]

    wrong = distributed.get_rank() == broken
    with Breaks("aten.addmm", one_element(3, 5), {4}) if wrong else nullcontext():
        train(path, prepared, steps=2, shares=prepare is not in_tensor_parallel, observe=observe)
    local = (one.to_local() if hasattr(one, "to_local") else one for one in kept[0].parameters())
    return [one.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for one in local]


def rows(path: Path, rank: int) -> dict[str, tuple[int, ...]]:
    """The shape of the rows of each product that a rank has checked in step 0, by phase and path."""
    first = next(iter(open_recording(str(path)).steps(rank)))
    found = [one for one in first.observations if one.slot.endswith(".residual") and not one.unobserved]
    return {f"{one.phase} {one.path}": one.shard.shape for one in found}


@pytest.mark.parametrize("prepare", [in_ddp, in_fsdp2, in_tensor_parallel])
def test_each_rank_checks_its_own_products_and_trains_the_same_bits(prepare: Prepare, tmp_path: Path) -> None:
    plain = run_on_ranks(recorded, 2, str(tmp_path / "plain"), prepare, EVERYTHING)
    checked = run_on_ranks(recorded, 2, str(tmp_path / "run"), prepare, (*EVERYTHING, "products"))

    assert checked == plain
    for rank in (0, 1):
        found = rows(tmp_path / "run", rank)
        assert {"forward blocks.1.up/aten.addmm[0]", "backward blocks.1.up/aten.mm[0]"} <= {*found}
    verdict = traindiff.check(tmp_path / "run", rules="product-wrong,product-inaccurate")
    assert (verdict.verdict, verdict.warnings) == ("healthy", ())
    assert verdict.products is not None
    assert all(row.ratio < 1.0 for row in verdict.products)


def test_a_distributed_tensor_shows_the_products_of_its_parts(tmp_path: Path) -> None:
    run_on_ranks(recorded, 2, str(tmp_path / "run"), in_tensor_parallel, ("products",))

    found = rows(tmp_path / "run", 0)
    assert found["backward blocks.1.up/aten.mm[1]"] == (32,)  # half of 64 features


def test_a_wrong_product_on_one_rank_names_the_rank(tmp_path: Path) -> None:
    run_on_ranks(recorded, 2, str(tmp_path / "run"), in_ddp, ("products",), 1)

    (found,) = traindiff.check(tmp_path / "run", rules="product-wrong").findings
    assert (found.rank, found.evidence["row"]) == (1, [3])
    assert found.phase == "forward"
