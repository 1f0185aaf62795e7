"""Modules that one run does not call: it computes the same with functions, or with another module."""

from __future__ import annotations

from dataclasses import replace

from traindiff.analyse.findings import Finding

COUNTED_CALLS = "num_batches_tracked"
"""Buffer of a BatchNorm that counts its calls. It changes nothing else, unless momentum is None."""

_OF_UNCALLED = "of_uncalled"


def is_uncalled(finding: Finding) -> bool:
    """True if a finding says that one run does not call a module, or counts none of its calls."""
    missing = finding.kind in ("missing", "extra") and finding.phase == "forward"
    return missing or bool(finding.evidence.get(_OF_UNCALLED))


def count_of_uncalled(finding: Finding) -> Finding:
    """The finding for a count of calls that differs because one run does not call the module, but its function."""
    path = finding.path.rpartition(".")[0]
    message = f"Only one run calls {path}, which counts its calls ({COUNTED_CALLS})."
    return replace(finding, message=message, evidence={**finding.evidence, _OF_UNCALLED: True})
