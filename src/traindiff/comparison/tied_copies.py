"""Copies of a tied parameter that disagree, under the names that ranks have for them."""

from __future__ import annotations

from dataclasses import replace

from traindiff.findings import Finding
from traindiff.merging.renames import Rename
from traindiff.merging.tying import Copies
from traindiff.rules.agreement import KIND as DISAGREEMENT


def with_names(finding: Finding, copies: Copies, rename: Rename = str) -> Finding:
    """The finding of copies that disagree, which then says where they have other names."""
    names = [
        f"rank {rank} calls it {path}"
        for rank, paths in copies.items()
        for path, first in paths.items()
        if rename(first) == finding.path
    ]
    if finding.kind != DISAGREEMENT or not names:
        return finding
    why = " Are the gradients of a tied parameter added up over the ranks that have it?"
    return replace(finding, says=f"{finding.says} ({', '.join(names)}.){why if finding.phase == 'grad' else ''}")
