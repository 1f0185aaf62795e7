"""Asynchronous collectives are not waited for in order to be observed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import _functional_collectives as functional_collectives

import traindiff
from tests.observe.hooks.reading import rows
from tests.observe.sharding.tensor_parallel import with_copies
from tests.observe.sharding.transformer import Transformer
from tests.on_ranks import run_on_ranks


def waits(path: str) -> list[Any]:
    """What becomes of asynchronous collectives while they are observed, on one of two ranks."""
    torch.manual_seed(0)
    model = with_copies(Transformer())
    found: list[Any] = []

    def look(_module: nn.Module, _args: Any, output: Tensor) -> None:
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


def test_a_collective_is_not_waited_for_in_order_to_be_observed(tmp_path: Path) -> None:
    found, _ = run_on_ranks(waits, 2, str(tmp_path / "run"))

    assert found == [["AsyncCollectiveTensor", False]]
    (seen,) = [seen for seen, _ in rows(tmp_path / "run", path="overwritten")]
    assert seen.unobserved == "it was written to before anybody waited for the collective that computes it"
    ((seen, summary),) = rows(tmp_path / "run", path="unused")
    assert not seen.unobserved
    assert summary["sum"] == 6.0
