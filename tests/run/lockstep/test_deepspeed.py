"""DeepSpeed's engines in lockstep with DistributedDataParallel, and with each other."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import traindiff
from tests.observe.sharding.deepspeed_training import NEEDS_DEEPSPEED, PARTITION_ALL, import_deepspeed
from tests.observe.sharding.training import BATCH, Model, rank_and_size
from tests.on_ranks import run_on_ranks
from tests.run.lockstep.sides import batches, lines, loss_of, plain, stepped

pytestmark = [NEEDS_DEEPSPEED, pytest.mark.release]


def ddp() -> Any:
    return plain(prepare=DistributedDataParallel)


def engine(stage: int, *, zero: dict[str, Any] | None = None, **config: Any) -> Any:
    """An engine with the model and the optimizer of `plain`; no clipping unless asked for."""
    deepspeed = import_deepspeed()
    torch.manual_seed(0)
    model = Model()
    made, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        config={
            "train_micro_batch_size_per_gpu": BATCH // rank_and_size()[1],
            "gradient_clipping": 0.0,
            "steps_per_print": None,
            "zero_optimization": {"stage": stage, **(zero or {})},
            **config,
        },
    )
    return made


def with_faults(made: Any) -> Any:
    """Two batches of the engine have a loss that is too large."""
    number = iter(range(9))

    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(made, tokens)
        made.backward(loss * (1.7 if next(number) in (1, 3) else 1.0))
        made.step()
        return loss

    return made, None, step


def ten_times(model: nn.Module, tokens: Tensor) -> Tensor:
    return 10.0 * loss_of(model, tokens)


Pair = Callable[[], tuple[traindiff.Comparison, str]]

PAIRS: dict[str, Pair] = {
    "ddp, stage 1": lambda: stepped(ddp(), engine(1)),
    "ddp, stage 3": lambda: stepped(ddp(), engine(3, zero=PARTITION_ALL)),
    "stage 0, stage 1": lambda: stepped(engine(0), engine(1), param_tol=1e-6, loss_tol=1e-6, grad_tol=1e-6),
    "default clipping": lambda: stepped(ddp(), engine(1, gradient_clipping=1.0), loss=ten_times),
    "resync: ddp, stage 3": lambda: stepped(ddp(), with_faults(engine(3, zero=PARTITION_ALL)), batches(5), resync=True),
    "resync: stage 3, gathered": lambda: stepped(ddp(), with_faults(engine(3)), batches(5), resync=True),
    "resync: stage 1, stage 3": lambda: stepped(
        engine(1), with_faults(engine(3, zero=PARTITION_ALL)), batches(5), resync=True
    ),
    "resync: stage 3, stage 1": lambda: stepped(
        engine(3, zero=PARTITION_ALL), with_faults(engine(1)), batches(5), resync=True
    ),
}


def trained() -> dict[str, Any]:
    found = {}
    for name, pair in PAIRS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # DeepSpeed uses names of collectives that torch renames
            comparison, printed = pair()
        found[name] = [comparison.verdict, str(comparison), printed]
    return found


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    first, second = run_on_ranks(trained, 2, timeout_seconds=240)
    assert {name: one[:2] for name, one in first.items()} == {name: one[:2] for name, one in second.items()}
    return first


@pytest.mark.parametrize("name", ["ddp, stage 1", "ddp, stage 3", "stage 0, stage 1"])
def test_a_stage_passes_to_the_bit(name: str, outcomes: dict[str, Any]) -> None:
    verdict, message, printed = outcomes[name]

    assert verdict == "identical", message
    assert "SETTING DIFFERS" not in printed
    assert printed.endswith("TEST PASSED\n")


def test_clipping_by_default_is_found_and_said_before_the_first_batch(outcomes: dict[str, Any]) -> None:
    _, message, printed = outcomes["default clipping"]

    before, after = printed.split("DIVERGED", maxsplit=1)
    assert "SETTING DIFFERS name=gradient_clipping baseline=none candidate=1\n" in before
    assert after.startswith(" GRADIENT rank=0 batch=0 ")
    assert "DeepSpeed does so by default since 0.19.3" in after
    assert printed.endswith("TEST FAILED\n"), message


@pytest.mark.parametrize("name", [name for name in PAIRS if name.startswith("resync")])
def test_resync_sets_an_engine_back_in_every_stage(name: str, outcomes: dict[str, Any]) -> None:
    _, message, printed = outcomes[name]

    assert sorted({line.split()[3] for line in lines(printed, "DIVERGED LOSS")}) == ["batch=1:", "batch=3:"], message
    assert "MISALIGNED" not in printed
    assert "Not set back" not in printed
