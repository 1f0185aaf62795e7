"""Parameters that an optimizer held in earlier steps, and no longer holds."""

from __future__ import annotations

from collections.abc import Callable, Collection

from traindiff.core.observation import MAYBE_UNSEEN, REPLACED, TAKEN_OUT
from traindiff.observe.common.sink import Sink

NOT_HELD = f"{MAYBE_UNSEEN}: the optimizer that is followed no longer holds it"


class HeldBefore:
    """Records that nothing more is known of parameters which an optimizer no longer holds.

    Args:
        sink: Receives the observations.
        optimizer: Name of the optimizer.
        observe: Names of what is observed.
        is_trained: Tells whether the parameter of the model with a path requires a gradient, and has one.

    Attributes:
        paths: The parameters that it held in recorded steps.
        of_others: Those that only an optimizer before this one held.
    """

    def __init__(
        self, sink: Sink, *, optimizer: str, observe: Collection[str], is_trained: Callable[[str], bool]
    ) -> None:
        self._sink = sink
        self._is_trained = is_trained
        self._optimizer = optimizer
        self._observe = observe
        self.paths: set[str] = set()
        self._settled: Collection[str] | None = None  # the latest paths, if none are gone
        self.of_others: set[str] = set()
        self._replaced: set[str] = set()  # of these, those whose place in the model another tensor has taken

    def add(self, other: HeldBefore) -> None:
        """Note that the optimizer steps in place of another one, whose parameters may still be stepped elsewhere."""
        self.of_others |= other.paths - self.paths | other.of_others
        self.paths |= other.paths
        self._settled = None

    def note(self, held: Collection[str]) -> None:
        """Note the paths that the optimizer holds in a step.

        If it holds as many new tensors that are none of the model's, these are the old ones: they lost their names.
        """
        if held is self._settled:
            return
        gone = self.paths.difference(held)
        nameless = {path for path in held if path.startswith(f"{self._optimizer}.groups[")}
        if len(nameless - self.paths) >= len(gone) > 0:
            self._replaced |= gone
        for path in sorted(gone):
            for phase, slot in (("grad", "grad"), ("optimizer", "state"), ("param", "value")):
                if phase in self._observe:
                    why = self._why(path) if phase == "grad" else NOT_HELD
                    self._sink.unobserved(why, phase=phase, path=path, slot=slot, optimizer=self._optimizer)
        self.paths.update(held)
        self.of_others.difference_update(held)
        self._settled = None if gone else held

    def _why(self, path: str) -> str:
        """The reason why nothing more is known of the gradient of a parameter."""
        if path in self._replaced:
            return REPLACED
        return TAKEN_OUT if path not in self.of_others and self._is_trained(path) else NOT_HELD
