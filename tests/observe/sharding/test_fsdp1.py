"""FullyShardedDataParallel, whose parameters are ranges of flat ones, against one process on the gathered batch."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import traindiff
from tests.observe.sharding.equivalence import assert_equivalent
from tests.observe.sharding.training import Block, Model, train
from tests.on_ranks import run_on_ranks
from traindiff.analyse.merge.run_steps import run_steps
from traindiff.analyse.rules.replay import replayed
from traindiff.storage import open_recording

EVERYTHING = ("batch", "forward", "loss", "backward", "grad", "optimizer", "update", "param", "replay", "grad.micro")


def sharded(model: Model, *, strategy: str = "FULL_SHARD", use_orig_params: bool = True) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=use_orig_params,
        sharding_strategy=ShardingStrategy[strategy],
        device_id=torch.device("cpu"),
    )


def train_everything(path: str, prepare=lambda model: model) -> None:
    train(path, prepare, observe=EVERYTHING)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "run"
    train_everything(path)
    return path


@pytest.mark.parametrize(
    ("world_size", "strategy", "use_orig_params"),
    [(2, "FULL_SHARD", True), (4, "FULL_SHARD", False), (2, "SHARD_GRAD_OP", True)],
)
def test_it_is_equivalent_to_one_process(
    world_size: int, strategy: str, use_orig_params: bool, reference: Path, tmp_path: Path
) -> None:
    prepare = partial(sharded, strategy=strategy, use_orig_params=use_orig_params)
    run_on_ranks(train_everything, world_size, str(tmp_path / "run"), prepare)

    comparison = traindiff.compare(reference, tmp_path / "run")

    assert comparison.verdict == "equivalent", str(comparison)
    assert not any(comparison.unaligned)
    compared = {(row.phase, row.stage) for row in comparison.differences}
    assert compared >= {
        ("forward", ""), ("backward", ""), ("grad", "micro"), ("grad", ""), ("optimizer", ""), ("update", ""),
        ("param", "before"),
    }  # fmt: skip
    run = open_recording(str(tmp_path / "run"))
    whole = open_recording(str(reference)).rank_content(0)["parameters"]
    for rank in run.ranks:
        assert run.rank_content(rank)["parameters"] == whole


class WithGain(Model):
    """Has a parameter of one element, beside which a count of steps has as many."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.gain


def train_with_gain(path: str, prepare=lambda model: model) -> None:
    train(path, prepare, make=WithGain)


def test_a_parameter_of_one_element_and_its_count_of_steps_are_told_apart(tmp_path: Path) -> None:
    train_with_gain(str(tmp_path / "one"))
    run_on_ranks(train_with_gain, 2, str(tmp_path / "run"), sharded)

    assert_equivalent(tmp_path / "one", tmp_path / "run")


def hybrid(model: Model) -> nn.Module:
    """Two ranks divide the parameters, and two pairs of ranks hold copies."""
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
        device_id=torch.device("cpu"),
    )


def test_parameters_that_are_divided_and_copied_are_equivalent(reference: Path, tmp_path: Path) -> None:
    run_on_ranks(train_everything, 4, str(tmp_path / "run"), hybrid)

    comparison = traindiff.compare(reference, tmp_path / "run")

    assert comparison.verdict == "equivalent", str(comparison)
    assert not any(comparison.unaligned)


def train_variants(directory: str) -> None:
    """What belongs to no matrix of settings."""
    for flat in (True, False):
        prepare = partial(sharded, strategy="SHARD_GRAD_OP", use_orig_params=not flat)
        train(f"{directory}/selected-{flat}", prepare, select="blocks.1.*", finds_optimizer=True)
        train(f"{directory}/tied-{flat}", partial(whole_in_one, use_orig_params=not flat), make=Tied)
        train(f"{directory}/every-{flat}", prepare, every=2, before_step=evaluate)


def whole_in_one(model: Model, *, use_orig_params: bool) -> nn.Module:
    return FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=torch.device("cpu"))


class Tied(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def evaluate(model: nn.Module) -> None:
    """After it, parameters may be gathered when the next step begins."""
    with torch.no_grad():
        model(torch.zeros(2, 6, dtype=torch.long))


def test_selections_tied_weights_and_evaluation(tmp_path: Path) -> None:
    run_on_ranks(train_variants, 2, str(tmp_path))
    train(tmp_path / "selected", select="blocks.1.*")
    train(tmp_path / "tied", make=Tied)
    train(tmp_path / "every", every=2, before_step=evaluate)

    for name in ("selected", "tied", "every"):
        for flat in (True, False):
            comparison = traindiff.compare(tmp_path / name, tmp_path / f"{name}-{flat}")
            assert comparison.verdict == "equivalent", f"{name}-{flat}: {comparison}"
            assert not any(comparison.unaligned)


def test_the_optimizer_is_replayed_on_what_each_rank_holds(tmp_path: Path) -> None:
    prepare = partial(sharded, use_orig_params=False)
    run_on_ranks(train_everything, 2, str(tmp_path / "run"), prepare)

    step = next(run_steps(open_recording(str(tmp_path / "run"))))
    replays = list(replayed(step.table))

    assert {one.key.path for one in replays} == {name for name, _ in Model().named_parameters()}
    assert all(one.worst < 1.0 for one in replays)
    assert {len(one.residual.parts) for one in replays} == {1, 2}
