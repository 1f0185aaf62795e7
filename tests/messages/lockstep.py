"""What `Lockstep` says of settings and sides that it cannot use, and of ranks that cannot go on."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn

import traindiff
from tests.messages.provoking import Chapter
from traindiff.compat.deepspeed import ModelStepper
from traindiff.run.lockstep.ranks import Ranks

chapter = Chapter("Lockstep", [])
situation = chapter.situation


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().sum()
    return loss


def side() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def with_step(*, every: int = 1, changes: int = 9) -> tuple[Any, ...]:
    """A side with a step of its own: it steps in every so manieth batch, and from one on it changes its batch."""
    model, optimizer = side()
    number = iter(range(9))

    def step(batch: Tensor) -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        current = next(number)
        if (current + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
        if current >= changes:
            batch.zero_()
        return loss

    return model, optimizer, step


def lockstep(baseline: Any, candidate: Any, *data: Any, **settings: Any) -> traindiff.Lockstep:
    return traindiff.Lockstep(baseline, candidate, *data, **{"loss": loss_of, "file": io.StringIO(), **settings})


def three() -> list[Tensor]:
    return [torch.ones(2, 3) for _ in range(3)]


@situation("one model for both sides, set back in batches that are not compared")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    same = side()
    lockstep(same, same, three(), resync=True, test_every=2)


@situation("sides with a map, of which one is set back by the other")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    lockstep(side(), side(), three(), resync=True, map="map.toml")


@situation("settings that cannot be")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    lockstep(
        side(), side(), three(), num_batches=0, test_every=1.5, param_tol="small", activation_tol=1e-5, resync=1,
        timeout_seconds=0,
    )  # fmt: skip


@situation("nothing to compare")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    lockstep(side(), side(), three(), track_params=False, track_loss=False, track_grads=False)


@situation("a module without its optimizer, and a step that cannot be called")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    lockstep(side()[0], (*side(), "step"), three())


@situation("no batches were given")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    lockstep(side(), side()).go()


@situation("there is not one batch")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    lockstep(side(), side(), []).go()


@situation("a model that does not compute its loss")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    lockstep(side(), side(), three(), loss=None).go()


@situation("a subclass of ModelStepper that overrides what is never called")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    type("Gathering", (ModelStepper,), {"_get_params": lambda self: None})


@situation("a baseline that changes its batch, but not the first one")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    lockstep(with_step(changes=1), side(), three()).go()


@situation("a candidate that accumulates gradients over two batches")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    lockstep(side(), with_step(every=2), three()).go()


@situation("a rank runs out of batches")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    stepper = lockstep(side(), side(), three())
    given = iter([[[1.0]], [[3.0, 1.0, 1.0]], [[1.0], [1.0], [0.0]]])
    patched.setattr(stepper._ranks, "meet", lambda numbers: next(given))
    stepper.go()


@situation("a rank whose optimizer does not step where that of the others does")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    stepper = lockstep(side(), side(), three())
    given = iter([[[1.0], [1.0]], [[4.0, 1.0, 1.0], [3.0, 1.0, 1.0]]])
    patched.setattr(stepper._ranks, "meet", lambda numbers: next(given))
    stepper.go()


def one_of_two() -> Ranks:
    """Rank 0 of two, of which the other one is not there."""
    ranks = Ranks(0.0)
    ranks.size = 2
    ranks._store = distributed.HashStore()
    return ranks


class Work:
    """A collective."""

    def __init__(self, *, completed: bool) -> None:
        self.completed = completed

    def is_completed(self) -> bool:
        return self.completed

    def wait(self) -> None:
        raise RuntimeError("Connection closed by peer")


@situation("another rank raises")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    ranks = one_of_two()
    ranks._store.set("failed", '{"rank": 1, "message": "ValueError: no such token"}')
    ranks.raise_failure()


@situation("another rank does not come")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    ranks = one_of_two()
    ranks._meetings = 1
    ranks._store.set("meeting-0", "1")
    patched.setattr(time, "monotonic", map(float, range(0, 6000, 600)).__next__)
    ranks._wait(Work(completed=False))


@situation("another rank ends without a reason")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    patched.setattr("traindiff.run.lockstep.ranks.GRACE_SECONDS", 0.0)
    one_of_two()._wait(Work(completed=True))
