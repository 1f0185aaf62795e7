"""On several ranks the one that makes the first NaN names itself."""

from __future__ import annotations

import pytest

from tests.observe.nonfinite.on_ranks import train, train_engine
from tests.observe.sharding.deepspeed_training import NEEDS_DEEPSPEED
from tests.on_ranks import RanksError, run_on_ranks


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_the_rank_on_which_the_forward_pass_breaks_is_named(engine: str) -> None:
    (first, _), (second, _) = run_on_ranks(train, 2, engine, "forward", "collect")

    step, rank, phase, path, message = second[0]
    assert (step, rank, phase, path) == (1, 1, "forward", "blocks.0.act.1")
    assert message.startswith("rank 1: blocks.0.act.1 output holds NaN; what Breaking was given is finite")
    # The other rank sees no more than the gradients that come to it.
    assert [(one[0], one[1], one[2]) for one in first[:1]] == [(1, 0, "grad")]


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_the_rank_on_which_the_backward_pass_breaks_is_named(engine: str) -> None:
    _, (second, _) = run_on_ranks(train, 2, engine, "backward", "collect")

    step, rank, phase, path, message = second[0]
    assert (step, rank, phase) == (1, 1, "backward")
    assert path == "blocks.0.act.0"
    assert "made by the backward pass of blocks.0.act.1 (Breaking)" in message


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_healthy_training_is_the_same_to_the_bit(engine: str) -> None:
    watched = run_on_ranks(train, 2, engine, "none", "collect", True)
    plain = run_on_ranks(train, 2, engine, "none", "collect", False)

    assert watched == plain
    assert [one[0] for one in watched] == [[], []]


def test_where_it_is_raised_the_others_are_told_by_their_collectives() -> None:
    with pytest.raises(RanksError) as caught:
        run_on_ranks(train, 2, "ddp", "forward", "raise")

    assert "NonFiniteError: Detected inf/nan during batch_number=1. rank 1: blocks.0.act.1 output" in str(caught.value)


@NEEDS_DEEPSPEED
@pytest.mark.parametrize(
    "stage", [pytest.param(stage, marks=() if stage == 3 else pytest.mark.release) for stage in range(4)]
)
def test_under_deepspeed_too(stage: int) -> None:
    healthy = run_on_ranks(train_engine, 2, stage, "none")
    assert healthy == [[[], [""]]] * 2

    _, (second, _) = run_on_ranks(train_engine, 2, stage, "forward")
    step, rank, phase, path, _ = second[0]
    assert (step, rank, phase, path) == (1, 1, "forward", "blocks.0.act.1")


@NEEDS_DEEPSPEED
@pytest.mark.release
def test_parameters_that_are_still_being_gathered_are_no_fault() -> None:
    assert run_on_ranks(train_engine, 2, 3, "unfinished gather") == [[[], [""]]] * 2
