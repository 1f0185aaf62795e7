"""Tell further parts of a step from micro-steps, where the training loop calls several modules."""

from __future__ import annotations

from traindiff.taps.progress import Progress


class Rounds:
    """What begins a micro-step: the module with which the step began, called again after a backward pass.

    That is how gradients are accumulated: each micro-batch goes the same way, and what is seen of it merges with the
    others. In a GAN another module may come next, or another optimizer may have stepped in between: then it is a
    further part of the same micro-step, and its calls are further calls.

    Args:
        progress: Where the training is.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._turn = -1
        self._first = ""

    def continues(self, path: str) -> bool:
        """Whether the call of a module, which keeps gradients, begins no micro-step.

        Args:
            path: Canonical path of the module.
        """
        turn = sum(self._progress.steps.values())
        if turn != self._turn:
            self._turn, self._first = turn, path
            return True
        return path != self._first
