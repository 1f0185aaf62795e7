"""Notice gradients that an optimizer has read, and that nothing clears before the next backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from traindiff.core.torch_compat.execution import version_of

_Held: TypeAlias = tuple[Tensor, ReferenceType[Tensor], int]
"""A parameter, its gradient, and the gradient's version."""


class CarriedGradients:
    """The gradients of one optimizer, from one step of it to the next.

    A gradient is carried into a step if it is the tensor that the step before read, nobody wrote to it in between, it
    is not all zeros, and then a backward pass adds to it, or the next step reads it once more. That is exact: it needs
    no noise floor. Counters of writes tell; only of a gradient that nobody wrote to are the numbers looked at, because
    writes through `.data` are not counted.
    """

    def __init__(self) -> None:
        self._held: list[_Held] = []
        self._added: set[int] = set()  # ids of parameters to whose gradients a backward pass has added
        self._num_backward = 0

    def after_step(self, parameters: Iterable[Tensor]) -> None:
        """Note the gradients as a step leaves them."""
        self.forget()
        for parameter in parameters:
            if (gradient := parameter.grad) is not None:
                self._held.append((parameter, ref(gradient), version_of(gradient)))

    def forget(self) -> None:
        """Nothing is known of the latest step."""
        self._held, self._num_backward = [], 0
        self._added.clear()

    def before_backward(self) -> None:
        """Drop the gradients that were replaced, or written to, since the latest step or backward pass."""
        if not self._held:
            return
        self._held = [held for held in self._held if _is_untouched(held)]
        if self._held and not self._num_backward:
            self._held = _with_numbers(self._held)
        self._num_backward += 1

    def after_backward(self) -> None:
        """Note the gradients as a backward pass leaves them."""
        held, self._held = self._held, []
        for parameter, seen, version in held:
            gradient = parameter.grad
            if gradient is None:
                continue
            if seen() is not gradient or version_of(gradient) != version:
                self._added.add(id(parameter))
            self._held.append((parameter, ref(gradient), version_of(gradient)))

    def carried(self) -> dict[int, bool]:
        """By the id of a parameter whose gradient is carried: whether a backward pass has added to it.

        To be called when the optimizer reads the gradients.
        """
        if not self._num_backward:
            return {}
        found = {}
        for held in self._held:
            added = id(held[0]) in self._added
            if added or _is_untouched(held):
                found[id(held[0])] = added
        return found


def _is_untouched(held: _Held) -> bool:
    parameter, seen, version = held
    gradient = parameter.grad
    return gradient is not None and seen() is gradient and version_of(gradient) == version >= 0


def _with_numbers(held: Sequence[_Held]) -> list[_Held]:
    """Those whose gradient is not all zeros; none of those that cannot be read now."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return []
    return [one for one in held if _has_numbers(one[0].grad)]


def _has_numbers(gradient: Tensor | None) -> bool:
    if gradient is None or gradient.is_meta:
        return False
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    with torch.no_grad():
        return bool((local.coalesce().values() if local.is_sparse else local).any())
