"""What a loss that differs hands back to the model: its value does not bound that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.distance import Pair
from traindiff.analyse.merge.site import SiteKey, finding_at

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


_CERTAIN = 100.0
"""Multiple of its floor above which no loss has made a difference of the rounding in what it was given."""

_SHARP = ", or it multiplies the rounding of what the model returns (a softmax at a low temperature)"

SEEN_AT = "seen_at"
"""Evidence of a loss that is computed otherwise: where that shows."""


def loss_behind(first: Finding, pairs: Sequence[Pair]) -> tuple[Pair, Finding] | None:
    """The loss of a step, and the finding that it is computed otherwise; None if that is not known.

    Nothing but the loss lies between what the model returns and the first gradient of the backward pass. If the one
    agrees and the other does not, the loss is another function, even if its value is the same within rounding. A factor
    is left alone: a loss scale or an average over ranks may put it there.

    Args:
        first: The first finding of both runs.
        pairs: All pairs of its step, in execution order.
    """
    if first.phase != "backward" or first.stage or first.kind == "scale":
        return None
    outputs = _outputs(pairs)
    before = [pair for pair in pairs if pair.baseline.order <= first.order]
    backward = [pair.baseline.key for pair in before if pair.baseline.key.phase == "backward"]
    losses = [pair for pair in before if pair.baseline.key[:2] == ("loss", "")]
    if not losses or not all(key._replace(phase="forward") in outputs for key in backward):
        return None
    seen = f"{first.path} {first.slot}".strip()
    is_large = first.difference is None or not first.floor or first.difference > _CERTAIN * first.floor
    message = (
        f"What the model returns agrees, and the gradient that the loss gives it (at {seen}) does not. So the loss is "
        f"computed otherwise{'' if is_large else _SHARP}, although its value agrees within rounding. Of that gradient: "
        f"{first.message}"
    )
    found = finding_at(
        losses[-1].baseline, step=first.step, kind=first.kind, message=message, difference=first.difference,
        floor=first.floor, rank=first.rank, micro_step=first.micro_step, evidence={**first.evidence, SEEN_AT: seen},
    )  # fmt: skip
    return losses[-1], replace(found, evaluation=first.evaluation)
