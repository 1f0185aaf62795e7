"""Train all sides on one batch, one after the other, as if each were alone."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from traindiff.core.torch_compat.execution import version_of
from traindiff.errors import LockstepError
from traindiff.observe.torch.hooks.nested import replaced, tensors
from traindiff.run.lockstep.live_side import LiveSide, noted
from traindiff.run.lockstep.stepped import follow_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomState:
    """The state of torch's, Python's and, where it is loaded, NumPy's global generators."""

    cpu: Tensor
    cuda: Tensor | None
    python: tuple[Any, ...]
    numpy: Any

    @classmethod
    def now(cls) -> RandomState:
        """The state as it is; draws nothing and waits for no device."""
        numpy = sys.modules.get("numpy")
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(
            cpu=torch.get_rng_state(),
            cuda=torch.cuda.get_rng_state() if cuda else None,
            python=random.getstate(),
            numpy=numpy.random.get_state() if numpy is not None else None,
        )

    def restore(self) -> None:
        """Have the generators go on from here."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


class BatchGuard:
    """Gives every side the batch as it came.

    Only the first batch is copied beforehand. Where a side is seen to change tensors of it, each side is given a copy
    of every batch from then on; one that first does so later is told of.
    """

    def __init__(self) -> None:
        self._number = -1
        self._copies = False
        self._batch: Any = None
        self._backup: Any = None
        self._versions: list[tuple[Tensor, int]] = []

    def begin(self, batch: Any) -> None:
        """A batch has come."""
        self._number += 1
        self._batch = batch
        self._versions = [(tensor, version_of(tensor)) for _, tensor in tensors(batch, "batch")]
        self._backup = _copied(batch) if self._copies or self._number == 0 else None

    def given(self) -> Any:
        """What the next side is given: the batch itself, or a copy of what came."""
        return _copied(self._backup) if self._copies else self._batch

    def end(self, side: str) -> None:
        """A side has been stepped.

        Raises:
            LockstepError: It has changed the batch in place, of which there is no copy.
        """
        if self._copies or all(version_of(tensor) == version for tensor, version in self._versions):
            return
        if self._backup is None:
            raise LockstepError(
                f"The step of the {side} changed a tensor of batch {self._number} in place, which it has not done to "
                "the first one: the next side would be given something else. Have the step work on a copy."
            )
        self._copies = True

    def release(self) -> None:
        """Let go of the batch."""
        self._batch = self._backup = None
        self._versions = []


def _copied(batch: Any) -> Any:
    copies = {
        id(tensor): tensor.detach().clone().requires_grad_(tensor.requires_grad) for _, tensor in tensors(batch, "")
    }
    return replaced(batch, copies)


def train_all(sides: Sequence[LiveSide], batch: Any, guard: BatchGuard, *, where: str) -> None:
    """The baseline first, and the candidate last. Each begins with the same random state, and all with the same batch.

    Afterwards generators go on from where the baseline has left them.

    Args:
        sides: Baseline, candidate, and copies of the baseline.
        batch: What to train on.
        guard: Keeps the batch as it came.
        where: Which batch, and on which rank, for what an error says.

    Raises:
        LockstepError: A side has changed the batch in place.
    """
    baseline, candidate, *copies = sides
    follow_settings(baseline.stepped, [one.stepped for one in copies])
    guard.begin(batch)
    before = after = RandomState.now()
    for side in (baseline, *copies, candidate):
        if side is not baseline:
            before.restore()
        with noted(f"traindiff.Lockstep: raised in the step of the {side.stepped.name}, in {where}."):
            side.step(guard.given())
        guard.end(side.stepped.name)
        if side is baseline:
            after = RandomState.now()
    after.restore()
    guard.release()
