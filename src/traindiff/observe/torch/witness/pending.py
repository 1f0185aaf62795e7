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
class Terms:
    """What uses of one parameter contribute to its gradient."""

    _sums: dict[tuple[int, bool], Tensor] = field(default_factory=dict)  # see `vectors`
    _latest: list[tuple[int, Use, Products]] = field(default_factory=list)  # micro-step, use, and what it contributes

    def __bool__(self) -> bool:
        """True if there is a use."""
        return bool(self._sums or self._latest)

    def clear(self) -> None:
        """Forget them."""
        self._sums.clear()
        self._latest.clear()

    def add(self, micro_step: int, use: Use, gradient: Tensor) -> None:
        """Add what a use contributes in a backward pass, given the gradient of its output."""
        self._latest.append((micro_step, use, use.products(gradient)))
        if len(self._latest) >= _MOST:
            self._settle()

    def _settle(self) -> None:
        """Add up what was added since."""
        for micro_step, use, found in self._latest:  # together, because the code for it is then in the cache
            vector, before = use.vector(found), self._sums.get((micro_step, use.is_own))
            self._sums[micro_step, use.is_own] = vector if before is None else before + vector
        self._latest.clear()

    def vectors(self) -> Iterator[tuple[int, bool, Tensor]]:
        """Micro-step, whether the term is this rank's own, and the vector with squared errors; see `rooted`.

        Ranks that work on the same samples may have terms of their own.
        """
        self._settle()
        for (micro_step, is_own), vector in sorted(self._sums.items(), key=lambda one: one[0]):
            yield micro_step, is_own, vector


@dataclass(slots=True)
class Expected:
    """What is expected of the gradient of one parameter.

    Attributes:
        terms: What is expected.
        layers: If `terms` are what backward passes contributed: what the calls of layers that were seen in compiled
            code should contribute. There may be other uses.
        sees_layers: Whether all calls of a layer that were seen are in `layers`.
        reason: Why it cannot be checked; empty if it can.
        is_read: An optimizer has read the gradient: what comes now begins anew.
        contributed: What backward passes contributed was taken as it is.
        left: The gradient of the parameter that the last backward pass left, by id of the tensor that holds it, with a
            counter of the writes to it.
        edited: The training wrote to the gradient between two backward passes.
    """

    terms: Terms = field(default_factory=Terms)
    layers: Terms = field(default_factory=Terms)
    sees_layers: bool = True
    reason: str = ""
    is_read: bool = False
    contributed: bool = False
    left: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    edited: bool = False

    @property
    def is_empty(self) -> bool:
        """Nothing has contributed to the gradient so far."""
        return not (self.terms or self.reason)

    def begin(self) -> None:
        """Forget what was read, or cleared."""
        self.terms.clear()
        self.layers.clear()
        self.left.clear()
        self.reason, self.is_read, self.contributed, self.edited, self.sees_layers = "", False, False, False, True

    def add(self, micro_step: int, use: Use, gradient: Tensor) -> None:
        """Add what a use of the parameter contributes in a backward pass, given the gradient of the output."""
        self.terms.add(micro_step, use, gradient)
        self.contributed |= use.is_contribution


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
