"""Labels that only the loss receives: no recording has them unless the training hands them over."""

from __future__ import annotations

from collections.abc import Iterable

from traindiff.findings import Finding
from traindiff.merging.distance import Pair


def of_unseen_targets(finding: Finding, pairs: Iterable[Pair]) -> str:
    """That the loss may differ by its labels, in a sentence that follows the finding's; empty for anything else.

    Args:
        finding: The first one.
        pairs: Of its step. Where the training hands over tensors of its own (`traindiff.inspect`), it knows how.
    """
    looks_like_labels = finding.kind in ("value", "scale", "offset") and "(=" not in finding.says
    if (finding.phase, finding.slot) != ("loss", "backward") or not looks_like_labels:
        return ""
    if any(pair.baseline.key.phase == "forward" and pair.baseline.key.slot == "value" for pair in pairs):
        return ""
    return (
        " Labels that only the loss receives are not recorded: if they may differ, "
        'traindiff.inspect("labels", labels) records them.'
    )
