"""Ranks that run out of inputs before others: DistributedDataParallel.join() and Join with ZeroRedundancyOptimizer."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.algorithms.join import Join
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import traindiff
from tests.observe.sharding.test_zero_redundancy import zero as sharded
from tests.observe.sharding.training import LENGTH, VOCABULARY, Model
from tests.on_ranks import run_on_ranks
from traindiff.storage import joined, open_recording

OBSERVED = ("batch", "forward", "loss", "backward", "grad", "grad.micro", "optimizer", "update", "param", "witness")


def train(
    path: str,
    *,
    inputs: tuple[int, int] = (2, 4),
    by_active: bool = False,
    micro_batches: int = 1,
    momentum: float = 0.0,
    zero: bool = False,
    wrong: tuple[int, int] | None = None,
    every: int = 1,
) -> None:
    """Two epochs with so many inputs on each rank. `wrong` is the rank and the input whose gradient is doubled."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    plain = partial(torch.optim.SGD, lr=0.1, momentum=momentum)
    optimizer: Any = (sharded if zero else plain)(model.parameters())
    rank = distributed.get_rank()
    data = torch.Generator().manual_seed(1 + rank)
    with traindiff.record(path, model, optimizer, strict=True, observe=OBSERVED, every=every):
        for _ in range(2):
            with Join([model, optimizer]) if zero else model.join(divide_by_initial_world_size=not by_active):
                for number in range(inputs[rank]):
                    tokens = torch.randint(VOCABULARY, (4, LENGTH + 1), generator=data)
                    is_last = (number + 1) % micro_batches == 0
                    with nullcontext() if is_last else model.no_sync():
                        logits = model(tokens[:, :-1])
                        functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
                    if (rank, number) == wrong:
                        gradient = model.module.head.weight.grad.numpy()  # which counts no writes
                        gradient *= 2.0
                    if is_last:
                        optimizer.step()
                        optimizer.zero_grad()
            optimizer.zero_grad()


RUNS: dict[str, dict[str, Any]] = {
    "by all": {},
    "by active": {"by_active": True},
    "other rank": {"by_active": True, "inputs": (3, 2)},
    "no inputs": {"by_active": True, "inputs": (0, 2)},
    "sharded": {"zero": True},
    "accumulated": {"by_active": True, "micro_batches": 2, "inputs": (4, 8)},
    "within a step": {"by_active": True, "micro_batches": 2, "inputs": (3, 6)},
    "every": {"by_active": True, "every": 2, "inputs": (3, 6)},
    "wrong": {"by_active": True, "wrong": (0, 1)},
    "wrong alone": {"by_active": True, "wrong": (1, 3)},
    "momentum": {"momentum": 0.9},
}


def train_all(directory: str) -> None:
    for name, how in RUNS.items():
        train(f"{directory}/{name}", **how)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("uneven")
    run_on_ranks(train_all, 2, str(directory))
    return directory


@pytest.mark.parametrize("name", [name for name in RUNS if not name.startswith(("wrong", "momentum"))])
def test_a_rank_may_run_out_of_inputs_before_others(name: str, runs: Path) -> None:
    checked = traindiff.check(runs / name)

    assert (checked.verdict, checked.warnings) == ("healthy", ()), str(checked)
    assert traindiff.compare(runs / name, runs / name).verdict == "identical"


def test_steps_of_one_number_are_the_same_step_again_after_it(runs: Path) -> None:
    recording = open_recording(str(runs / "by active"))

    assert [step.step for step in recording.steps(0)] == [0, 1, 4, 5]
    assert [step.step for step in recording.steps(1)] == [*range(8)]
    assert [one.steps for one in joined(recording.rank_content(0))] == [range(2, 4), range(6, 8)]
    assert joined(recording.rank_content(1)) == []


def test_a_step_for_which_a_rank_had_a_part_of_the_inputs_is_not_witnessed(runs: Path) -> None:
    (note,) = [one for one in traindiff.check(runs / "within a step").notes if "a part of the step only" in one]

    assert note.startswith("Not witnessed in 2 of 6 steps")


def test_the_divisor_tells_runs_apart(runs: Path) -> None:
    first = traindiff.compare(runs / "by all", runs / "by active").first_divergence

    assert first is not None
    assert first.step == 2
    assert "2 x the baseline's" in first.message


@pytest.mark.parametrize(("name", "step"), [("wrong", 1), ("wrong alone", 3)])
def test_a_wrong_gradient_is_found_among_them(name: str, step: int, runs: Path) -> None:
    findings = traindiff.check(runs / name).findings

    assert (findings[0].step, findings[0].site) == (step, "head.weight grad")
    assert any(one.kind == "wrong-gradient" and one.step == step for one in findings)


def test_the_state_of_an_optimizer_that_lags_behind_is_explained(runs: Path) -> None:
    first = traindiff.check(runs / "momentum").findings[0]

    assert (first.step, first.kind, first.phase) == (4, "ranks-disagree", "optimizer")
    assert "Rank 0 had no inputs for some steps before" in first.message
