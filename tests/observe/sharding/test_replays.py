"""Optimizers are replayed on what each rank holds, however an engine divides parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.optim import _muon

import traindiff
from tests.faulty_step import at_end_of_step
from tests.observe.sharding.prepared import in_tensor_parallel
from tests.observe.sharding.test_data_parallel import fully_sharded
from tests.observe.sharding.test_fsdp1 import sharded
from tests.observe.sharding.training import Model, adamw, train
from tests.on_ranks import run_on_ranks
from traindiff.analyse.merge.run_steps import run_steps
from traindiff.analyse.rules.replay import replayed
from traindiff.core.orthogonality import TERMS
from traindiff.core.witness import elements
from traindiff.storage import open_recording

ENGINES: dict[str, Callable[[Model], nn.Module]] = {
    "fsdp2": fully_sharded,
    "tensor-parallel": in_tensor_parallel,
    "fsdp1": sharded,
    "fsdp1-flat": partial(sharded, use_orig_params=False),
}


def growing(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Adds a thousandth of each parameter to it in every step."""
    optimizer = adamw(parameters)

    def grow(*_: object) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.data.mul_(1.001)

    at_end_of_step(optimizer, grow)
    return optimizer


def in_columns(model: Model) -> nn.Module:
    """FSDP2 that divides matrices into columns."""
    mesh = init_device_mesh("cpu", (2,))
    return fully_shard(model, mesh=mesh, shard_placement_fn=lambda one: Shard(1) if one.dim() == 2 else Shard(0))


def rmsprop(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=1e-2, momentum=0.9, centered=True)


def muon(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon([one for one in parameters if one.dim() == 2])


OPTIMIZERS = {"rmsprop": rmsprop, "muon": muon}


def longer(factor: float) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """Makes a Muon whose updates are multiplied by a factor."""

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = muon(parameters)
        held = optimizer.param_groups[0]["params"]
        before: list[torch.Tensor] = []
        optimizer.register_step_pre_hook(lambda *_: before.extend(one.detach().clone() for one in held))

        def change(*_: object) -> None:
            for parameter, old in zip(held, before, strict=True):
                parameter.data.copy_(old + factor * (parameter.data - old))
            before.clear()

        at_end_of_step(optimizer, change)
        return optimizer

    return make


def normalized(matrix: torch.Tensor, *_: object) -> torch.Tensor:
    return matrix / matrix.norm()


def signs(matrix: torch.Tensor, *_: object) -> torch.Tensor:
    return matrix.sign()


MUONS: dict[str, Any] = {"muon-normalized": normalized, "muon-signs": signs}
"""What is done in place of Newton-Schulz iterations."""

LONGER = {"muon-longer": 3.0, "muon-backwards": -1.0}


def train_all(directory: str) -> None:
    for name, make_optimizer in OPTIMIZERS.items():
        train(f"{directory}/{name}", fully_sharded, make_optimizer=make_optimizer)
    for name, factor in LONGER.items():
        train(f"{directory}/{name}", fully_sharded, make_optimizer=longer(factor))
    for name, function in MUONS.items():
        with patch.object(_muon, "_zeropower_via_newtonschulz", function):
            train(f"{directory}/{name}", fully_sharded, make_optimizer=muon)
    train(f"{directory}/muon-columns", in_columns, make_optimizer=muon)
    for name, engine in ENGINES.items():
        shares = engine is not in_tensor_parallel
        train(f"{directory}/{name}", engine, shares=shares)
        train(f"{directory}/{name}-growing", engine, make_optimizer=growing, shares=shares)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("replays")
    run_on_ranks(train_all, 2, str(directory))
    return directory


@pytest.mark.parametrize("engine", ENGINES)
def test_all_of_every_parameter_is_replayed(engine: str, runs: Path) -> None:
    step = next(run_steps(open_recording(str(runs / engine))))
    replays = list(replayed(step.table))

    assert {one.key.path for one in replays} == {name for name, _ in Model().named_parameters()}
    for one in replays:
        assert one.worst < 1.0
        held = {part.shard for part in one.residual.parts}  # ranks may hold copies
        assert sum(shard.size for shard in held) == int(one.residual.summary["count"])
        assert int(one.residual.summary["count"]) == dict(Model().named_parameters())[one.key.path].numel()


def test_other_formulas_of_elements_are_replayed_on_shards(runs: Path) -> None:
    step = [*run_steps(open_recording(str(runs / "rmsprop")))][2]

    replays = list(replayed(step.table))
    assert {one.key.path for one in replays} == {name for name, _ in Model().named_parameters()}
    assert {one.optimizer for one in replays} == {"RMSprop"}
    assert max(one.worst for one in replays) < 1.0


@pytest.mark.parametrize("run", ["muon", "muon-columns"])
def test_of_muon_on_shards_that_is_checked_which_adds_up_and_a_note_says_so_once(run: str, runs: Path) -> None:
    verdict = traindiff.check(runs / run)

    assert verdict.verdict == "healthy", str(verdict)
    reason = "Muon needs the whole parameter, and each rank holds a part: only what adds up over ranks is checked"
    assert verdict.notes.count(f"An optimizer is not replayed: {reason}.") == 1, verdict.notes
    step = next(run_steps(open_recording(str(runs / run))))
    terms = {key.path: entry for key, entry in step.table.items() if key.stage == TERMS}
    matrices = {name: one for name, one in Model().named_parameters() if one.dim() == 2}
    assert terms.keys() == matrices.keys()
    dim, sign = (0, 1.0) if run == "muon" else (1, -1.0)
    for path, entry in terms.items():
        assert sum(elements(part.summary)[0] for part in entry.parts) == sign * matrices[path].shape[dim]


@pytest.mark.parametrize(
    ("run", "says"),
    [
        ("muon-longer", "its norm is"),
        ("muon-signs", "its norm is"),
        ("muon-normalized", "its norm is 1 x the learning rate, and the iterations give"),
        ("muon-backwards", "along its momentum it is -"),
    ],
)
def test_an_update_of_muon_on_shards_that_is_not_orthogonal_is_found(run: str, says: str, runs: Path) -> None:
    verdict = traindiff.check(runs / run)

    matrices = {name for name, one in Model().named_parameters() if one.dim() == 2}
    found = [one for one in verdict.findings if one.kind == "update-rule"]
    assert {one.path for one in found} == matrices, str(verdict)
    assert (found[0].step, found[0].phase) == (0, "update")
    for one in found:
        expected = (
            f"Muon moves {one.path} by something else than its momentum, orthogonalized. Summed over ranks, {says}"
        )
        assert one.message.startswith(expected), one.message


@pytest.mark.parametrize("engine", ENGINES)
def test_what_an_optimizer_does_wrong_is_found_without_a_baseline(engine: str, runs: Path) -> None:
    assert traindiff.check(runs / engine).verdict == "healthy"

    verdict = traindiff.check(runs / f"{engine}-growing")

    first = verdict.findings[0]
    assert (first.step, first.phase, first.kind) == (0, "update", "update-rule"), str(verdict)
