"""What inputs have given for gradients so far, until an optimizer reads these gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from traindiff.core.witness import PROBES
from traindiff.observe.torch.witness.products import Products
from traindiff.observe.torch.witness.use import Use

_MOST = 64
"""Uses whose numbers are kept before they are added up."""


@dataclass(slots=True)
class Expected:
    """What is expected of the gradient of one parameter.

    Attributes:
        terms: By micro-step, and by whether ranks that work on the same samples have terms of their own: a vector with
            squared errors. `settle` brings it up to date.
        reason: Why it cannot be checked; empty if it can.
        is_read: An optimizer has read the gradient: what comes now begins anew.
        contributed: What backward passes contributed was taken as it is.
        left: The gradient of the parameter that the last backward pass left, by id of the tensor that holds it, with a
            counter of the writes to it.
        edited: The training wrote to the gradient between two backward passes.
    """

    terms: dict[tuple[int, bool], Tensor] = field(default_factory=dict)
    _latest: list[tuple[int, Use, Products]] = field(default_factory=list)  # micro-step, use, and what it contributes
    reason: str = ""
    is_read: bool = False
    contributed: bool = False
    left: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    edited: bool = False

    @property
    def is_empty(self) -> bool:
        """Nothing has contributed to the gradient so far."""
        return not (self.terms or self._latest or self.reason)

    def begin(self) -> None:
        """Forget what was read, or cleared."""
        self.terms.clear()
        self._latest.clear()
        self.left.clear()
        self.reason, self.is_read, self.contributed, self.edited = "", False, False, False

    def add(self, micro_step: int, use: Use, gradient: Tensor) -> None:
        """Add what a use of the parameter contributes in a backward pass, given the gradient of the output."""
        self._latest.append((micro_step, use, use.products(gradient)))
        self.contributed |= use.is_contribution
        if len(self._latest) >= _MOST:
            self.settle()

    def settle(self) -> None:
        """Add up to `terms` what was added since."""
        for micro_step, use, found in self._latest:  # together, because the code for it is then in the cache
            vector, before = use.vector(found), self.terms.get((micro_step, use.is_own))
            self.terms[micro_step, use.is_own] = vector if before is None else before + vector
        self._latest.clear()

    def vectors(self) -> Iterator[tuple[int, bool, Tensor]]:
        """Micro-step, whether the term is this rank's own, and the vector with squared errors; see `rooted`."""
        self.settle()
        for (micro_step, is_own), vector in sorted(self.terms.items(), key=lambda one: one[0]):
            yield micro_step, is_own, vector


def rooted(vectors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Vectors with the roots of their squared errors, computed together for each device."""
    by_device: dict[torch.device, list[int]] = {}
    for place, vector in enumerate(vectors):
        by_device.setdefault(vector.device, []).append(place)
    found = list(vectors)
    for places in by_device.values():
        table = torch.stack([vectors[place] for place in places])
        table[:, PROBES:].sqrt_()
        for place, row in zip(places, table.unbind(), strict=True):
            found[place] = row
    return found
