"""What a loss that differs hands back to the model: its value does not bound that."""

from __future__ import annotations

from collections.abc import Sequence

from traindiff.analyse.merge.distance import Pair
from traindiff.analyse.merge.site import SiteKey

_BEHIND = ("backward", "grad", "optimizer", "update")


class BehindOtherLoss:
    """Knows which sites of a step follow from a loss that differs, and from nothing that was measured behind it.

    Two losses of nearly the same value may have gradients that have nothing in common: other labels, another weight of
    a term. Once the gradients of the model's outputs are measured, what follows them is judged by these.

    Args:
        pairs: All pairs of the step.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._outputs = _outputs(pairs)
        self._measured = False

    def follows(self, key: SiteKey) -> bool:
        """True if a site follows from the loss alone; sites must be given in execution order, if a loss differs."""
        if key.phase not in _BEHIND:
            return False
        if key.phase == "backward" and key._replace(phase="forward") in self._outputs:
            self._measured = True
            return True
        return not self._measured


def _outputs(pairs: Sequence[Pair]) -> frozenset[SiteKey]:
    """The outputs of the models, also where a module inside returns the same tensor."""
    roots = {pair.baseline.key.path for pair in pairs if pair.baseline.key.phase == "batch"}
    forward = [pair.baseline for pair in pairs if pair.baseline.key.phase == "forward" and pair.baseline.exact]
    bits = {int(entry.summary["fingerprint"]) for entry in forward if entry.key.path in roots}
    return frozenset(entry.key for entry in forward if int(entry.summary["fingerprint"]) in bits)
