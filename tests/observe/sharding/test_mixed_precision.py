"""Mixed precision under data parallelism: what is the fair reference, and whether it is equivalent.

A policy of FSDP casts parameters and inputs to bfloat16 and keeps float32 parameters in the optimizer. The same is
autocast in one process, up to the operations that autocast leaves in float32; a float32 process is the reference in
which only the precision differs. Floors follow the shorter dtype of each site in either case.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import traindiff
from tests.observe.sharding.test_data_parallel import fully_sharded, in_ddp
from tests.observe.sharding.training import Block, Model, train
from tests.on_ranks import run_on_ranks

SHORT = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def in_fsdp1(model: Model) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(**SHORT),
        device_id=torch.device("cpu"),
    )


def in_fsdp2(model: Model, **settings: bool) -> nn.Module:
    return fully_sharded(model, mp_policy=MixedPrecisionPolicy(**SHORT), **settings)


def doubled(model: nn.Module) -> None:
    """Gradients summed over ranks instead of averaged."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= 2.0


RUNS: dict[str, tuple[Callable[[str], None], tuple[str, ...]]] = {
    "fsdp1": (partial(train, prepare=in_fsdp1), ("float32", "autocast")),
    "fsdp2": (partial(train, prepare=in_fsdp2), ("float32", "autocast")),
    "fsdp2-kept": (partial(train, prepare=partial(in_fsdp2, reshard_after_forward=False)), ("autocast",)),
    "ddp-bfloat16": (partial(train, prepare=in_ddp, dtype=torch.bfloat16), ("bfloat16",)),
    "ddp-autocast": (partial(train, prepare=in_ddp, autocast=True), ("autocast",)),
    "fsdp2-bfloat16": (partial(train, prepare=fully_sharded, dtype=torch.bfloat16), ("bfloat16",)),
}
"""By name: the training on two ranks, and its references in one process."""


def train_all(directory: str) -> None:
    for name, (run, _) in RUNS.items():
        run(f"{directory}/{name}")
    train(f"{directory}/doubled", in_fsdp2, before_step=doubled)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("precision")
    run_on_ranks(train_all, 2, str(directory))
    train(directory / "float32")
    train(directory / "autocast", autocast=True)
    train(directory / "bfloat16", dtype=torch.bfloat16)
    return directory


@pytest.mark.parametrize(
    ("reference", "name"), [(reference, name) for name, (_, references) in RUNS.items() for reference in references]
)
def test_it_is_equivalent_to_one_process(reference: str, name: str, runs: Path) -> None:
    comparison = traindiff.compare(runs / reference, runs / name)

    assert comparison.verdict == "equivalent", str(comparison)
    assert not any(comparison.unaligned)


@pytest.mark.parametrize("reference", ["float32", "autocast"])
def test_a_wrong_reduction_is_found_all_the_same(reference: str, runs: Path) -> None:
    first = traindiff.compare(runs / reference, runs / "doubled").first_divergence

    assert first is not None
    assert (first.step, first.phase, first.kind) == (0, "grad", "scale")
    assert "(= world size 2: summed over ranks instead of averaged?)" in first.message
