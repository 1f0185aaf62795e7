"""Optimizers are replayed on what each rank holds, however an engine divides parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import traindiff
from tests.observe.sharding.prepared import in_tensor_parallel
from tests.observe.sharding.test_data_parallel import fully_sharded
from tests.observe.sharding.test_fsdp1 import sharded
from tests.observe.sharding.training import Model, adamw, train
from tests.on_ranks import run_on_ranks
from traindiff.analyse.merge.run_steps import run_steps
from traindiff.analyse.rules.replay import replayed
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

    optimizer.register_step_post_hook(grow)
    return optimizer


def rmsprop(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(parameters, lr=1e-2, momentum=0.9, centered=True)


def muon(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon([one for one in parameters if one.dim() == 2])


OPTIMIZERS = {"rmsprop": rmsprop, "muon": muon}


def train_all(directory: str) -> None:
    for name, make_optimizer in OPTIMIZERS.items():
        train(f"{directory}/{name}", fully_sharded, make_optimizer=make_optimizer)
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


def test_a_formula_of_whole_parameters_is_not_replayed_on_shards_and_a_note_says_so_once(runs: Path) -> None:
    verdict = traindiff.check(runs / "muon")

    assert verdict.verdict == "healthy", str(verdict)
    reason = "Muon needs the whole parameter, and each rank holds a part"
    assert sum(reason in note for note in verdict.notes) == 1, verdict.notes


@pytest.mark.parametrize("engine", ENGINES)
def test_what_an_optimizer_does_wrong_is_found_without_a_baseline(engine: str, runs: Path) -> None:
    assert traindiff.check(runs / engine).verdict == "healthy"

    verdict = traindiff.check(runs / f"{engine}-growing")

    first = verdict.findings[0]
    assert (first.step, first.phase, first.kind) == (0, "update", "update-rule"), str(verdict)
