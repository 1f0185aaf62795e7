"""The same batch for every side, also where one of them changes it in place."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from traindiff.errors import LockstepError
from traindiff.taps.nested import replaced, tensors


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
        self._versions = [(tensor, _version(tensor)) for _, tensor in tensors(batch, "batch")]
        self._backup = _copied(batch) if self._copies or self._number == 0 else None

    def given(self) -> Any:
        """What the next side is given: the batch itself, or a copy of what came."""
        return _copied(self._backup) if self._copies else self._batch

    def end(self, side: str) -> None:
        """A side has been stepped.

        Raises:
            LockstepError: It has changed the batch in place, of which there is no copy.
        """
        if self._copies or all(_version(tensor) == version for tensor, version in self._versions):
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


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _copied(batch: Any) -> Any:
    copies = {
        id(tensor): tensor.detach().clone().requires_grad_(tensor.requires_grad) for _, tensor in tensors(batch, "")
    }
    return replaced(batch, copies)
