"""BatchNorm where it computes something else because its batch, or its mode, is another."""

from __future__ import annotations

import re
from collections.abc import Mapping

from traindiff.alignment.pairs import Aligned
from traindiff.findings import Finding

_STATISTICS = re.compile(r"(Lazy)?BatchNorm[123]d|SyncBatchNorm")
_COUNTER = "num_batches_tracked"


def of_batch_statistics(
    finding: Finding, modules: Mapping[str, str], aligned: Aligned, micro_steps: tuple[int, int]
) -> str:
    """Why a BatchNorm's output differs, in a sentence that follows the finding's; empty for anything else.

    Args:
        finding: The first one.
        modules: Class name of each module by path.
        aligned: The sites of its step. In evaluation mode BatchNorm does not count its batches, and its counter is
            recorded in steps that change it.
        micro_steps: Into how many micro-batches each run divides the step's batch.
    """
    name = modules.get(finding.path, "")
    if finding.phase != "forward" or not _STATISTICS.fullmatch(name):
        return ""
    for run, entries in (("candidate", aligned.only_baseline), ("baseline", aligned.only_candidate)):
        if any(entry.key.path == f"{finding.path}.{_COUNTER}" for entry in entries):
            return f" The {run}'s {name} does not take note of this batch, the other run's does: is it in eval mode?"
    if micro_steps[0] != micro_steps[1]:
        return (
            f" {name} takes the statistics of each micro-batch, and the step has {micro_steps[0]} in the baseline and "
            f"{micro_steps[1]} in the candidate: such runs differ rightly."
        )
    return ""
