"""Faults of data-parallel trainings: each is found at its step, phase, site and rank, and says what it looks like."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.func import functional_call
from torch.nn import functional

import traindiff
from tests.observe.sharding.test_data_parallel import fully_sharded, in_ddp
from tests.observe.sharding.test_fsdp1 import sharded
from tests.observe.sharding.training import BATCH, LENGTH, VOCABULARY, Model, rank_and_size
from tests.on_ranks import run_on_ranks
from traindiff.analyse.compare.verdict import Comparison
from traindiff.analyse.findings import Finding

PADDING = -100
LIMIT = 0.05


class Tied(Model):
    """The head is the embedding; `loses` leaves out what the head contributes to its gradient."""

    def __init__(self, *, loses: bool = False) -> None:
        super().__init__()
        self.head.weight = self.embed.weight
        self.loses = loses

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return functional_call(self.head, {"weight": self.head.weight.detach()}, (x,)) if self.loses else self.head(x)


def train(
    path: str | Path,
    *,
    prepare: Callable[[Any], nn.Module] = lambda model: model,
    make: Callable[[], Model] = Model,
    masked: tuple[int, ...] = (0,) * BATCH,
    globally: bool = True,
    before: Callable[[int, nn.Module], None] = lambda step, model: None,
    backward: Callable[[Tensor, Any], None] = lambda loss, scaler: scaler.scale(loss).backward(),
    scaled: bool = False,
    clip: Callable[[nn.Module], Any] | None = None,
    reported: Callable[[nn.Module], float] | None = None,
) -> None:
    """Three steps. `masked` says how many tokens at the end of each sample have no label.

    `globally` normalizes the loss by the number of labels in the global batch, as DDP's averaging needs it.
    """
    torch.manual_seed(0)
    model = prepare(make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    rank, size = rank_and_size()
    data = torch.Generator().manual_seed(1)
    with traindiff.record(path, model, optimizer, strict=True) as run:
        for step in range(3):
            tokens = torch.randint(VOCABULARY // 2, (BATCH, LENGTH + 1), generator=data)
            labels = tokens[:, 1:].clone()
            for sample, count in enumerate(masked):
                labels[sample, LENGTH - count :] = PADDING
            before(step, model)
            mine, wanted = tokens[:, :-1].chunk(size)[rank], labels.chunk(size)[rank]
            total = functional.cross_entropy(model(mine).flatten(0, 1), wanted.flatten(), reduction="sum")
            count = int((labels != PADDING).sum()) / size if globally else int((wanted != PADDING).sum())
            backward(total / count, scaler)
            if scaled:
                scaler.unscale_(optimizer)
            if clip is not None:
                clip(model)
            if reported is not None:
                run.log("grad_norm", reported(model))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


UNEQUAL = (0, 0, 0, 1, 5, 4, 5, 3)


def stale(step: int, model: nn.Module, *, at: int) -> None:
    """On the last rank one weight is what it was before a broadcast that has left it out."""
    if step == at and distributed.get_rank() == distributed.get_world_size() - 1:
        with torch.no_grad():
            next(p for name, p in model.named_parameters() if name.endswith("blocks.1.up.weight")).mul_(1.01)


def apply_nothing(loss: Tensor, scaler: Any) -> None:
    """The scale is made, and not used."""
    scaler.scale(loss)
    loss.backward()


def norm_of_all(model: nn.Module) -> float:
    return float(sum(p.grad.square().sum() for p in model.parameters()) ** 0.5)


def norm_without_biases(model: nn.Module) -> float:
    return float(sum(p.grad.square().sum() for p in model.parameters() if p.dim() > 1) ** 0.5)


def norm_of_shards_with_copies(model: nn.Module, *, twice: bool) -> float:
    """Of FSDP2: squares of local shards, added up over ranks; those of the first block are counted on every rank."""
    total = 0.0
    for name, parameter in model.named_parameters():
        squares = parameter.grad.to_local().square().sum()
        distributed.all_reduce(squares)
        total += float(squares) * (2.0 if twice and name.startswith("blocks.0") else 1.0)
    return total**0.5


def clip_all(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)


def clip_by_method(model: Any) -> None:
    model.clip_grad_norm_(LIMIT)


RUNS: dict[str, Callable[[str], None]] = {
    "local-count-equal": partial(train, prepare=in_ddp, globally=False, masked=(2,) * BATCH),
    "local-count": partial(train, prepare=in_ddp, globally=False, masked=UNEQUAL),
    "global-count": partial(train, prepare=in_ddp, masked=UNEQUAL),
    "norm-without-biases": partial(train, prepare=in_ddp, reported=norm_without_biases),
    "norm-of-shards": partial(train, prepare=fully_sharded, reported=partial(norm_of_shards_with_copies, twice=False)),
    "norm-twice": partial(train, prepare=fully_sharded, reported=partial(norm_of_shards_with_copies, twice=True)),
    "scale-not-applied": partial(train, prepare=in_ddp, scaled=True, backward=apply_nothing),
    "scaled": partial(train, prepare=in_ddp, scaled=True),
    "clipped-ddp": partial(train, prepare=in_ddp, clip=clip_all),
    "clipped-fsdp1": partial(train, prepare=sharded, clip=clip_by_method),
    "clipped-fsdp2": partial(train, prepare=fully_sharded, clip=clip_all),
    "tied": partial(train, prepare=in_ddp, make=Tied),
    "tied-lost": partial(train, prepare=in_ddp, make=partial(Tied, loses=True)),
}


def train_all(directory: str) -> None:
    for name, run in RUNS.items():
        run(f"{directory}/{name}")


def train_stale(directory: str) -> None:
    train(f"{directory}/stale-0", prepare=in_ddp, before=partial(stale, at=0))
    train(f"{directory}/stale-1", prepare=in_ddp, before=partial(stale, at=1))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("faults")
    run_on_ranks(train_all, 2, str(directory))
    run_on_ranks(train_stale, 4, str(directory))
    train(directory / "plain")
    train(directory / "reporting", reported=norm_of_all)
    train(directory / "masked", masked=UNEQUAL)
    train(directory / "masked-equally", masked=(2,) * BATCH)
    train(directory / "plain-clipped", clip=clip_all)
    train(directory / "plain-tied", make=Tied)
    return directory


def compared(runs: Path, baseline: str, candidate: str) -> Comparison:
    return traindiff.compare(runs / baseline, runs / candidate)


def first_of(comparison: Comparison) -> Finding:
    assert comparison.first_divergence is not None, str(comparison)
    return comparison.first_divergence


@pytest.mark.parametrize(
    ("baseline", "candidate"),
    [
        ("masked-equally", "local-count-equal"),
        ("masked", "global-count"),
        ("plain", "scaled"),
        ("reporting", "norm-of-shards"),
        ("plain-clipped", "clipped-ddp"),
        ("plain-clipped", "clipped-fsdp1"),
        ("plain-clipped", "clipped-fsdp2"),
        ("plain-tied", "tied"),
    ],
)
def test_what_is_correct_is_equivalent(baseline: str, candidate: str, runs: Path) -> None:
    comparison = compared(runs, baseline, candidate)

    assert comparison.verdict == "equivalent", str(comparison)


def test_a_loss_normalized_by_each_ranks_own_count_shows_where_masks_are_unequal(runs: Path) -> None:
    (first,) = compared(runs, "masked", "local-count").findings  # the gradients follow from it

    assert (first.step, first.phase, first.path, first.slot) == (0, "loss", "loss", "backward")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("norm-without-biases", "leaves out all parameters with one axis (biases, norms)"),
        ("norm-twice", "counts all of blocks.0.* twice"),
    ],
)
def test_a_reported_norm_is_held_against_the_gradients_of_all_ranks(name: str, message: str, runs: Path) -> None:
    first, following = compared(runs, "reporting", name).findings

    assert (first.step, first.phase, first.path) == (0, "loss", "grad_norm")
    # It might be a coincidence; the second time in a row it is not.
    assert (following.phase, following.path, following.kind) == ("loss", "grad_norm", "reported-norm")
    assert following.step > 0
    assert message in following.message


def test_a_weight_that_is_stale_on_one_rank_from_the_beginning_is_found_there(runs: Path) -> None:
    first = first_of(compared(runs, "plain", "stale-0"))

    assert (first.step, first.rank, first.phase, first.stage, first.path, first.kind) == (
        0, 3, "param", "before", "blocks.1.up.weight", "ranks-disagree",
    )  # fmt: skip
    assert "rank 3 holds another copy of blocks.1.up.weight value than ranks 0, 1 and 2" in first.message


def test_a_weight_that_becomes_stale_is_found_at_once_and_the_rank_named(runs: Path) -> None:
    first, following, *_ = compared(runs, "plain", "stale-1").findings

    assert (first.step, first.phase, first.path, first.kind) == (1, "param", "blocks.1.up.weight", "edited")
    assert first.message == (
        "In the candidate, blocks.1.up.weight changed on rank 3 between step 0 and step 1, not by the optimizer's step."
    )
    assert (following.step, following.rank, following.phase, following.path, following.kind) == (
        1, 3, "param", "blocks.1.up.weight", "ranks-disagree",
    )  # fmt: skip


def test_a_loss_scale_that_is_divided_out_without_being_applied(runs: Path) -> None:
    first = first_of(compared(runs, "plain", "scale-not-applied"))

    assert (first.step, first.phase, first.slot, first.kind) == (0, "loss", "backward", "scale")
    assert (
        "(= 1/1024, one over the candidate's loss scale: divided out without being applied, or twice?)" in first.message
    )


@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2"])
def test_clipping_by_default(engine: str, runs: Path) -> None:
    first, following, *_ = compared(runs, "plain", f"clipped-{engine}").findings

    assert (first.step, first.phase, first.stage, first.kind) == (0, "grad", "clipped", "clipping")
    assert "clips gradients to a norm of 0.05; the baseline does not clip" in first.message
    assert following.message.startswith("All gradients are 0.0601 x the baseline's (= what clipping makes of them).")


def test_the_contribution_of_a_tied_head_is_missed(runs: Path) -> None:
    first = first_of(compared(runs, "plain-tied", "tied-lost"))

    assert (first.step, first.phase, first.path, first.kind) == (0, "grad", "embed.weight", "tied-gradient")
    assert "lacks what head contributes" in first.message
