"""Mixed precision under data parallelism: what is the fair reference, and whether it is equivalent.

A policy of FSDP casts parameters and inputs to bfloat16 and keeps float32 parameters in the optimizer. The same is
autocast in one process, up to the operations that autocast leaves in float32; a float32 process is the reference in
which only the precision differs. Floors follow the shorter dtype of each site in either case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import traindiff
from tests.observe.sharding.test_data_parallel import fully_sharded, in_ddp
from tests.observe.sharding.training import Block, Model, train
from tests.on_ranks import run_on_ranks

SHORT = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def in_fsdp1(model: Model, dtypes: Mapping[str, torch.dtype] = SHORT) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(**dtypes),
        device_id=torch.device("cpu"),
    )


def in_fsdp2(model: Model, dtypes: Mapping[str, torch.dtype] = SHORT, **settings: bool) -> nn.Module:
    return fully_sharded(model, mp_policy=MixedPrecisionPolicy(**dtypes), **settings)


def in_compressing_ddp(model: Model) -> nn.Module:
    wrapped: Any = in_ddp(model)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped


def doubled(model: nn.Module) -> None:
    """Gradients summed over ranks instead of averaged."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= 2.0


def wrong_by_a_tenth(model: nn.Module) -> None:
    """The last gradient (with FSDP1, those of a block), without a write that torch counts."""
    gradient: Any = list(model.parameters())[-1].grad
    if gradient is not None:
        getattr(gradient, "_local_tensor", gradient).data.mul_(1.1)


RUNS: dict[str, tuple[Callable[[str], None], tuple[str, ...]]] = {
    "fsdp1": (partial(train, prepare=in_fsdp1), ("float32", "autocast")),
    "fsdp2": (partial(train, prepare=in_fsdp2), ("float32", "autocast")),
    "fsdp2-kept": (partial(train, prepare=partial(in_fsdp2, reshard_after_forward=False)), ("autocast",)),
    "ddp-bfloat16": (partial(train, prepare=in_ddp, dtype=torch.bfloat16), ("bfloat16",)),
    "ddp-autocast": (partial(train, prepare=in_ddp, autocast=True), ("autocast",)),
    "fsdp2-bfloat16": (partial(train, prepare=fully_sharded, dtype=torch.bfloat16), ("bfloat16",)),
}
"""By name: the training on two ranks, and its references in one process."""

REDUCED: dict[str, Callable[[Model], nn.Module]] = {
    "fsdp1-bfloat16": partial(in_fsdp1, dtypes={"reduce_dtype": torch.bfloat16}),
    "fsdp1-float16": partial(in_fsdp1, dtypes={"reduce_dtype": torch.float16}),
    "fsdp2-bfloat16": partial(in_fsdp2, dtypes={"reduce_dtype": torch.bfloat16}),
    "fsdp2-float16": partial(in_fsdp2, dtypes={"reduce_dtype": torch.float16}),
    "fsdp2-computed-in-float16": partial(
        in_fsdp2, dtypes={"param_dtype": torch.float16, "reduce_dtype": torch.bfloat16}
    ),
    "ddp-float16": in_compressing_ddp,
}
"""By name: engines that reduce gradients in a shorter dtype than they are in."""

WITNESS = ("batch", "forward", "loss", "backward", "grad", "optimizer", "update", "param", "grad.micro", "witness")


def train_all(directory: str) -> None:
    for name, (run, _) in RUNS.items():
        run(f"{directory}/{name}")
    train(f"{directory}/doubled", in_fsdp2, before_step=doubled)
    for name, prepare in REDUCED.items():
        train(f"{directory}/reduced-{name}", prepare, micro_batches=2, observe=WITNESS)
        train(f"{directory}/wrong-{name}", prepare, micro_batches=2, observe=WITNESS, before_step=wrong_by_a_tenth)


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


@pytest.mark.parametrize("name", REDUCED)
def test_a_reduction_in_a_shorter_dtype_rounds_gradients(name: str, runs: Path) -> None:
    checked = traindiff.check(runs / f"reduced-{name}")
    comparison = traindiff.compare(runs / "float32", runs / f"reduced-{name}")

    assert checked.verdict == "healthy", str(checked)
    assert comparison.verdict == "equivalent", str(comparison)
    assert any("reduced over ranks in their own dtype in the baseline" in note for note in comparison.notes)


@pytest.mark.parametrize("name", REDUCED)
def test_a_gradient_that_is_wrong_by_more_than_that_is_found(name: str, runs: Path) -> None:
    findings = traindiff.check(runs / f"wrong-{name}").warnings  # a training may mean to write to a gradient

    assert {(one.kind, one.step) for one in findings if one.step == 0} == {("wrong-gradient", 0)}, findings
    assert {one.path for one in findings} <= {path for path, _ in Model().named_parameters() if path != "embed.weight"}
    assert findings[0].evidence["factor"] == pytest.approx(1.1, rel=5e-3)


@pytest.mark.parametrize("reference", ["float32", "autocast"])
def test_a_wrong_reduction_is_found_all_the_same(reference: str, runs: Path) -> None:
    first = traindiff.compare(runs / reference, runs / "doubled").first_divergence

    assert first is not None
    assert (first.step, first.phase, first.kind) == (0, "grad", "scale")
    assert "(= world size 2: summed over ranks instead of averaged?)" in first.message
