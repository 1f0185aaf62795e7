"""Findings that say the same of many sites, together: lost optimizer state is one thing, not one per parameter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from traindiff.site import label

if TYPE_CHECKING:
    from traindiff.findings import Finding

_PER_PARAMETER = frozenset({"grad", "optimizer", "update", "param"})
"""Phases whose sites say nothing of where in the model a difference comes from: every parameter has them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Findings of one step, phase, slot and kind.

    Attributes:
        first: The first in execution order.
        paths: Of all of them, in that order.
    """

    first: Finding
    paths: tuple[str, ...]

    @property
    def site(self) -> str:
        """The first one's site, and how many more there are."""
        more = len(self.paths) - 1
        return label(self.first.path, self.first.slot) + (f" and {more} more" if more else "")


def grouped(findings: Iterable[Finding]) -> list[Group]:
    """Findings in groups, in the order of the first of each. What a module returned stands alone."""
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for finding in findings:
        key: tuple[object, ...] = (finding.step, finding.phase, finding.stage, finding.slot, finding.kind)
        if finding.phase not in _PER_PARAMETER:
            key = (*key, finding.path, finding.call)
        groups.setdefault(key, []).append(finding)
    return [Group(first=same[0], paths=tuple(one.path for one in same)) for same in groups.values()]
