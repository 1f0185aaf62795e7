"""What makes a training a replica, for as long as it is attached."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Protocol

from traindiff.taps.sink import Sink

NAME = "replica"
"""What a fault in a perturbation is filed under."""


class Replica(Protocol):
    """One way to perturb a training within rounding."""

    def attach(self, sink: Sink) -> ExitStack:
        """Perturb the training from now on; to be called before taps are attached, which see what it did.

        Returns:
            Close it to have the training as it was.
        """
