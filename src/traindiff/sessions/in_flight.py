"""Results of asynchronous collectives, put off until somebody has waited for them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from traindiff.observation import Observation
from traindiff.taps._torch_compat import arrived, has_arrived, is_asynchronous, versions_of

OVERWRITTEN = "it was written to before anybody waited for the collective that computes it"


class InFlight:
    """Holds observed tensors that a collective is still computing.

    To read them would be to wait for them earlier than the training does, and to overlap less than it would.
    """

    def __init__(self) -> None:
        self._held: list[tuple[Tensor, Observation, tuple[int, int]]] = []

    def holds(self, tensor: Tensor, seen: Observation) -> bool:
        """Keep the tensor for later if it has not arrived."""
        if not is_asynchronous(tensor) or has_arrived(tensor):
            return False
        self._held.append((tensor, seen, versions_of(tensor)))
        return True

    def arrived(self, *, all_of_them: bool = False) -> Iterator[tuple[Tensor, Observation, str]]:
        """Remove and yield those that can be read, each with the reason if it can no more.

        Args:
            all_of_them: Wait for the others: nobody has in this step, e.g. as nobody used them.
        """
        if not self._held:
            return
        held, self._held = self._held, []
        for index, (tensor, seen, versions) in enumerate(held):
            if versions_of(tensor) != versions:
                yield tensor, seen, OVERWRITTEN
            elif all_of_them or has_arrived(tensor):
                yield arrived(tensor), seen, ""
            else:
                self._held.append(held[index])

    def clear(self) -> None:
        """Drop everything."""
        self._held.clear()
