"""What inputs have given for gradients so far, until an optimizer reads these gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from traindiff.core.witness import PROBES
from traindiff.observe.torch.witness.use import Use


@dataclass(slots=True)
class Expected:
    """What is expected of the gradient of one parameter.

    Attributes:
        terms: By micro-step, and by whether ranks that work on the same samples have terms of their own: a vector with
            squared errors.
        reason: Why it cannot be checked; empty if it can.
        is_read: An optimizer has read the gradient: what comes now begins anew.
        contributed: What backward passes contributed was taken as it is.
        left: The gradient of the parameter that the last backward pass left, by id of the tensor that holds it, with a
            counter of the writes to it.
    """

    terms: dict[tuple[int, bool], Tensor] = field(default_factory=dict)
    reason: str = ""
    is_read: bool = False
    contributed: bool = False
    left: dict[int, tuple[Tensor, int]] = field(default_factory=dict)

    def begin(self) -> None:
        """Forget what was read, or cleared."""
        self.terms.clear()
        self.left.clear()
        self.reason, self.is_read, self.contributed = "", False, False

    def add(self, micro_step: int, use: Use, gradient: Tensor) -> None:
        """Add what a use of the parameter contributes in a backward pass, given the gradient of the output."""
        vector, before = use.vector(gradient), self.terms.get((micro_step, use.is_own))
        self.terms[micro_step, use.is_own] = vector if before is None else before + vector
        self.contributed |= use.is_contribution

    def vectors(self) -> Iterator[tuple[int, bool, Tensor]]:
        """Micro-step, whether the term is this rank's own, and the vector with roots of the squared errors."""
        for (micro_step, is_own), vector in sorted(self.terms.items()):
            yield micro_step, is_own, torch.cat([vector[:PROBES], vector[PROBES:].sqrt()])
