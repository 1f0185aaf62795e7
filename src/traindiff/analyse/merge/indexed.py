"""A step's table with its sites of each phase and stage at hand: many rules look at a few sites of it each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from typing import Any, TypeVar

from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable

Site = tuple[SiteKey, MergedSite]
"""A site of a step: its key and its entry."""

_T = TypeVar("_T")
_Kind = tuple[str, str]


class IndexedTable(dict[SiteKey, MergedSite]):
    """A copy of a step's table that does not change any more.

    Attributes:
        by_kind: Its sites by phase and stage, in execution order.
        found: What was computed from it so far: sites of several kinds, and results of functions.
    """

    __slots__ = ("_kinds", "by_kind", "found")

    def __init__(self, table: StepTable) -> None:
        super().__init__(table)
        self.by_kind: dict[_Kind, list[Site]] = {}
        self.found: dict[Any, Any] = {}
        self._kinds = [key[:2] for key in self]
        for kind, site in zip(self._kinds, self.items(), strict=True):
            same = self.by_kind.get(kind)
            if same is None:
                same = self.by_kind[kind] = []
            same.append(site)

    def clear(self) -> None:
        """Drop the sites, so that no two steps are in memory when the next one is read."""
        super().clear()
        self._kinds.clear()
        self.by_kind.clear()
        self.found.clear()

    def sites(self, phases: tuple[str, ...], stage: str | None) -> Sequence[Site]:
        """Sites of some phases (of all, if none is named) and of a stage (of all, if it is None)."""
        if len(phases) == 1 and stage is not None:
            return self.by_kind.get((phases[0], stage), ())
        asked = phases, stage
        found: Sequence[Site] | None = self.found.get(asked)
        if found is None:
            kinds = _kinds(tuple(self.by_kind), phases, stage)
            if len(kinds) < 2:
                found = [site for kind in kinds for site in self.by_kind[kind]]
            else:
                found = [site for kind, site in zip(self._kinds, self.items(), strict=True) if kind in kinds]
            self.found[asked] = found
        return found


def indexed(table: StepTable) -> IndexedTable:
    """A table with its sites at hand; the same, if it is one."""
    return table if isinstance(table, IndexedTable) else IndexedTable(table)


def sites(table: StepTable, *phases: str, stage: str | None = None) -> Sequence[Site]:
    """Sites of a step in execution order: of some phases (of all, if none is named) and of a stage (None: of all)."""
    if isinstance(table, IndexedTable):
        return table.sites(phases, stage)
    return [site for site in table.items() if _is_of(site[0][:2], phases, stage)]


@lru_cache(maxsize=1 << 12)
def _kinds(kinds: tuple[_Kind, ...], phases: tuple[str, ...], stage: str | None) -> frozenset[_Kind]:
    """Those of some phases and of a stage: the same in one step after the other."""
    return frozenset(kind for kind in kinds if _is_of(kind, phases, stage))


def _is_of(kind: _Kind, phases: tuple[str, ...], stage: str | None) -> bool:
    return (not phases or kind[0] in phases) and (stage is None or kind[1] == stage)


def once(function: Callable[[StepTable], _T]) -> Callable[[StepTable], _T]:
    """Let a function of a table be computed once for each indexed table. Callers must not change what it returns."""

    @wraps(function)
    def computed_once(table: StepTable) -> _T:
        if not isinstance(table, IndexedTable):
            return function(table)
        if function not in table.found:
            table.found[function] = function(table)
        result: _T = table.found[function]
        return result

    return computed_once
