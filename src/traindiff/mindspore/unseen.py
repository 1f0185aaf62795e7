"""Notice steps that were taken where nothing could be seen: parameters change, and no step is known."""

from __future__ import annotations

from collections.abc import Collection

from traindiff.errors import TraindiffError
from traindiff.mindspore.arrays import as_real, elements, read
from traindiff.mindspore.targets import Targets

UNSEEN_STEPS = (
    "the parameters of {names} have changed, and no step was seen: what calls it was compiled before it was "
    "observed. Call record(...), or monitor(...), before the first call of what mindspore.jit has decorated, or of "
    "Model.train"
)


class UnseenStepsError(TraindiffError):
    """Steps were taken where nothing of them could be seen."""


class Unseen:
    """Remembers the bits of the parameters of each optimizer.

    Args:
        targets: What is observed.
    """

    def __init__(self, targets: Targets) -> None:
        self._held = {one.name: [sight.parameter for sight in one.after] for one in targets.optimizers}
        self._bits = {name: self._read(name) for name in self._held}

    def look(self, *, without: Collection[str]) -> None:
        """Look whether parameters or state have changed that no step is known of.

        Args:
            without: Names of optimizers of which steps are known.

        Raises:
            UnseenStepsError: They have.
        """
        names = [name for name, bits in self._bits.items() if name not in without and bits != self._read(name)]
        if names:
            raise UnseenStepsError(UNSEEN_STEPS.format(names=" and ".join(names)))

    def _read(self, name: str) -> list[int]:
        return [hash(elements(as_real(read(parameter))).bits.tobytes()) for parameter in self._held[name]]
