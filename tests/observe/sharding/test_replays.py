"""Optimizers are replayed on what each rank holds, however an engine divides parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import traindiff
from tests.observe.sharding.test_data_parallel import fully_sharded
from tests.observe.sharding.test_fsdp1 import sharded
from tests.observe.sharding.training import Model, adamw, train
from tests.on_ranks import run_on_ranks
from traindiff.analyse.merge.run_steps import run_steps
from traindiff.analyse.rules.replay import replayed
from traindiff.storage import open_recording

ENGINES: dict[str, Callable[[Model], nn.Module]] = {
    "fsdp2": fully_sharded,
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


def train_all(directory: str) -> None:
    for name, engine in ENGINES.items():
        train(f"{directory}/{name}", engine)
        train(f"{directory}/{name}-growing", engine, make_optimizer=growing)


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
        assert sum(part.shard.size for part in one.residual.parts) == int(one.residual.summary["count"])
        assert int(one.residual.summary["count"]) == dict(Model().named_parameters())[one.key.path].numel()


@pytest.mark.parametrize("engine", ENGINES)
def test_what_an_optimizer_does_wrong_is_found_without_a_baseline(engine: str, runs: Path) -> None:
    assert traindiff.check(runs / engine).verdict == "healthy"

    verdict = traindiff.check(runs / f"{engine}-growing")

    first = verdict.findings[0]
    assert (first.step, first.phase, first.kind) == (0, "update", "update-rule"), str(verdict)
