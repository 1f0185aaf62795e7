"""Two sides on two ranks, divided alike or not."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import traindiff
from tests.observe.sharding.training import Model
from tests.on_ranks import RanksError, run_on_ranks
from tests.run.lockstep.sides import altered, batches, lines, loss_of, overwriting, plain, scaled, stepped


def ddp(**settings: Any) -> Any:
    return plain(prepare=DistributedDataParallel, **settings)


def fsdp2() -> Any:
    def prepare(model: Model) -> nn.Module:
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    return plain(prepare=prepare)


def fsdp1() -> Any:
    return plain(
        prepare=lambda model: FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    )


def tensor_parallel() -> Any:
    def prepare(model: Model) -> nn.Module:
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=("tp",))
        for block in model.blocks:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model

    return plain(prepare=prepare)


def on_own_part(side: Any) -> Any:
    """The side on this rank's part of a batch, of which all ranks are given all."""
    model, optimizer = side

    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(model, tokens.chunk(distributed.get_world_size())[distributed.get_rank()])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return model, optimizer, step


def two_faults(model: nn.Module, number: int) -> None:
    if number == 1:
        next(model.parameters()).grad.mul_(1.5)
    if number == 3:
        list(model.parameters())[5].grad.neg_()


def on_rank_1(model: nn.Module, _number: int) -> None:
    """What only one rank does to its copies."""
    if distributed.get_rank() == 1:
        model.module.head.weight.grad[3] += 1.0


Pair = Callable[[], tuple[traindiff.Comparison, str]]

PAIRS: dict[str, Pair] = {
    "ddp, ddp": lambda: stepped(ddp(), ddp()),
    "ddp, fsdp2": lambda: stepped(ddp(), fsdp2()),
    "fsdp2, ddp": lambda: stepped(fsdp2(), ddp()),
    "ddp, tensor parallel": lambda: stepped(on_own_part(ddp()), tensor_parallel(), batches(shares=False)),
    "ddp, ddp that does not learn": lambda: stepped(ddp(), ddp(lr=0.0)),
    "ddp, fsdp2 with 1.5 x the gradients": lambda: stepped(ddp(), altered(fsdp2(), scaled(1.5)), grad_tol=1e-3),
    "ddp, ddp of which rank 1 is off": lambda: stepped(ddp(), altered(ddp(), on_rank_1)),
    "resync: ddp, fsdp2": lambda: stepped(ddp(), altered(fsdp2(), two_faults), batches(5), resync=True),
    "resync: fsdp2, ddp": lambda: stepped(fsdp2(), altered(ddp(), two_faults), batches(5), resync=True),
    "resync: ddp, fsdp1": lambda: stepped(
        ddp(), altered(fsdp1(), lambda model, number: scaled(1.5 if number in (1, 3) else 1.0)(model, number)),
        batches(5), resync=True,
    ),
    "resync: ddp, tensor parallel": lambda: stepped(
        on_own_part(ddp()), altered(tensor_parallel(), two_faults), batches(5, shares=False), resync=True
    ),
}  # fmt: skip


def trained() -> dict[str, Any]:
    found = {}
    for name, pair in PAIRS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            comparison, printed = pair()
        found[name] = [comparison.verdict, comparison.calibrated, str(comparison), printed]
    return found


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, Any]]:
    return run_on_ranks(trained, 2, timeout_seconds=200)


@pytest.mark.parametrize("name", PAIRS)
def test_all_ranks_agree_and_only_rank_0_prints(name: str, outcomes: list[dict[str, Any]]) -> None:
    first, second = (one[name] for one in outcomes)

    assert first[:3] == second[:3]
    assert second[3] == ""
    assert first[3].splitlines()[-1] in ("TEST PASSED", "TEST FAILED")


@pytest.mark.parametrize("name", ["ddp, ddp", "ddp, fsdp2", "fsdp2, ddp", "ddp, tensor parallel"])
def test_the_same_training_under_another_engine_passes(name: str, outcomes: list[dict[str, Any]]) -> None:
    verdict, _, message, printed = outcomes[0][name]

    assert verdict in ("identical", "equivalent"), message
    assert printed.endswith("TEST PASSED\n")


def test_a_fault_is_found_across_engines(outcomes: list[dict[str, Any]]) -> None:
    printed = outcomes[0]["ddp, ddp that does not learn"][3]
    assert next(lines(printed)).startswith("DIVERGED PARAMETER rank=0 batch=0 param_idx=0 name=embed.weight ")
    printed = outcomes[0]["ddp, fsdp2 with 1.5 x the gradients"][3]
    assert next(lines(printed)).startswith("DIVERGED GRADIENT rank=0 batch=0 grad_idx=0 name=embed.weight ")
    assert printed.endswith("TEST FAILED\n")


def test_the_rank_is_named_where_only_one_differs(outcomes: list[dict[str, Any]]) -> None:
    printed = outcomes[0]["ddp, ddp of which rank 1 is off"][3]

    assert next(lines(printed)).startswith("DIVERGED GRADIENT rank=1 batch=0 grad_idx=15 name=head.weight ")


@pytest.mark.parametrize("name", [name for name in PAIRS if name.startswith("resync")])
def test_resync_sets_the_candidate_back_however_ranks_divide_it(name: str, outcomes: list[dict[str, Any]]) -> None:
    printed = outcomes[0][name][3]

    assert list(dict.fromkeys(line.split()[3] for line in lines(printed))) == ["batch=1", "batch=3"], printed
    assert "Not set back" not in printed
    assert "MISALIGNED" not in printed


def runs_out() -> str:
    with pytest.raises(traindiff.LockstepError) as raised:
        stepped(ddp(), ddp(), batches(4)[: 4 - 2 * distributed.get_rank()], test_every=3)
    return str(raised.value)


def test_a_rank_that_runs_out_of_batches_is_named_on_every_rank() -> None:
    message = "Rank 1 ran out of batches after 2, and rank 0 has more. Give all ranks as many, or num_batches=2."
    assert run_on_ranks(runs_out, 2, timeout_seconds=60) == [message, message]


def fails_on_rank_1() -> str:
    """Rank 1 raises where no collective of an engine waits for it."""
    model, optimizer = plain()

    def step(tokens: Tensor) -> Tensor:
        if distributed.get_rank() == 1:
            raise ValueError("no such token")
        return loss_of(model, tokens)

    with pytest.raises((traindiff.LockstepError, ValueError)) as raised:
        stepped(plain(), (model, optimizer, step))
    return f"{type(raised.value).__name__}: {raised.value}"


def test_what_one_rank_raises_ends_all_of_them_with_its_name() -> None:
    others, own = run_on_ranks(fails_on_rank_1, 2, timeout_seconds=60)

    assert own == "ValueError: no such token"
    assert others == (
        "LockstepError: Rank 1 cannot go on: ValueError: no such token traindiff.Lockstep: raised in the step of the "
        "candidate, in batch 0, on rank 1."
    )


def fails_inside_an_engine() -> None:
    """Rank 1 raises where the other one waits for it in the engine's own collective."""
    model, optimizer = ddp()

    def step(tokens: Tensor) -> Tensor:
        if distributed.get_rank() == 1:
            raise ValueError("no such token")
        loss = loss_of(model, tokens)
        loss.backward()
        return loss

    stepped(ddp(), (model, optimizer, step))


def test_a_rank_that_waits_inside_an_engine_is_told_too() -> None:
    with pytest.raises(RanksError) as raised:
        run_on_ranks(fails_inside_an_engine, 2, timeout_seconds=60)

    assert "LockstepError: Rank 1 cannot go on: ValueError: no such token" in str(raised.value)
    assert "did not end" not in str(raised.value)


def never_comes() -> str:
    if distributed.get_rank() == 1:
        traindiff.Lockstep(ddp(), ddp(), loss=loss_of, file=io.StringIO())
        distributed.distributed_c10d._get_default_store().get("done")
        return ""
    stepper = traindiff.Lockstep(ddp(), ddp(), loss=loss_of, file=io.StringIO(), timeout_seconds=1.0)
    with pytest.raises(traindiff.LockstepError) as raised:
        stepper.step(batches(1)[0])
    distributed.distributed_c10d._get_default_store().set("done", "1")
    return str(raised.value)


def test_a_rank_that_never_comes_is_named_after_the_time_given() -> None:
    message, _ = run_on_ranks(never_comes, 2, timeout_seconds=60)

    assert re.match(r"Rank 0 has waited \d+ seconds for rank 1: still in a step, hanging in a collective", message)


def changes_a_batch_on_rank_1() -> str:
    baseline = overwriting(lambda number: number == 1 and distributed.get_rank() == 1)
    with pytest.raises(traindiff.LockstepError) as raised:
        stepped(baseline, plain())
    return str(raised.value)


def test_what_lockstep_itself_refuses_on_one_rank_ends_all_of_them() -> None:
    others, own = run_on_ranks(changes_a_batch_on_rank_1, 2, timeout_seconds=60)

    assert own.startswith("The step of the baseline changed a tensor of batch 1 in place")
    assert others == f"Rank 1 cannot go on: LockstepError: {own}"
