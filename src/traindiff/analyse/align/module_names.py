"""Modules of two runs that are one, as the parameters in them suggest."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

from traindiff.core.maps.entries import Entry

_OWN = ("weight", "bias")
"""Names of the parameters of a module that returns what it computes with them alone."""

Expanded = tuple[list[str], list[str], Entry]
"""Names of parameters in the baseline and in the candidate, and the entry that says that they are one."""

_Link = tuple[tuple[str, ...], tuple[str, ...]]


def module_names(
    pairs: Sequence[Expanded],
    named: Sequence[tuple[str, str]],
    modules: Sequence[Collection[str]],
    hidden: Mapping[str, str],
) -> Iterator[tuple[list[str], list[str], Literal["unplaced", "padded"] | None]]:
    """Modules of the baseline and of the candidate that are one, and what is not known of what they return.

    Modules whose parameters are one return the same; modules that hold such modules are one, unless they hold others as
    well. The roots are one in any case.

    Args:
        pairs: Parameters that are one.
        named: Modules that are one, as the user says.
        modules: Paths of all modules, of each run.
        hidden: What is not known of a parameter, by its name in the baseline.
    """
    links: dict[_Link, Literal["unplaced", "padded"] | None] = {}
    holders: list[tuple[str, str]] = []
    for here, there, entry in pairs:
        link, leaves = _parents(here, there)
        if leaves <= {*_OWN}:
            moved = len(here) + len(there) > 2 or entry.layout.moves_rows
            padded = hidden.get(here[0]) == "padded"
            known = links.get(link)
            links[link] = known or ("unplaced" if moved else "padded" if padded else None)
        elif len(link[0]) == len(link[1]) == 1:
            holders.append((link[0][0], link[1][0]))
    for link in links:
        here, there = (sorted({_parent(name) for name in names}) for names in link)
        if len(here) == len(there) == 1:
            holders.append((here[0], there[0]))
    single = {name for link in links for name in (*link[0], *link[1])}
    chosen = dict(named)
    yield from ((list(one[0]), list(one[1]), hides) for one, hides in _unambiguous(links))
    above = _above(holders)
    for baseline, candidate in above.items():
        free = baseline not in chosen and candidate not in chosen.values() and not {baseline, candidate} & single
        if free and baseline in modules[0] and candidate in modules[1]:
            yield [baseline], [candidate], None
    for baseline, candidate in named:
        yield [baseline], [candidate], None


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _parents(here: Sequence[str], there: Sequence[str]) -> tuple[_Link, set[str]]:
    link = (tuple(dict.fromkeys(map(_parent, here))), tuple(dict.fromkeys(map(_parent, there))))
    return link, {name.rpartition(".")[2] for name in (*here, *there)}


def _unambiguous(
    links: Mapping[_Link, Literal["unplaced", "padded"] | None],
) -> Iterator[tuple[_Link, Literal["unplaced", "padded"] | None]]:
    """The links of modules that are in no other link."""
    for side in (0, 1):
        count: dict[str, int] = {}
        for link in links:
            for name in link[side]:
                count[name] = count.get(name, 0) + 1
        links = {link: hides for link, hides in links.items() if all(count[name] == 1 for name in link[side])}
    yield from links.items()


def _above(holders: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Modules that hold modules which are one, by the baseline's path; those that are ambiguous are left out."""
    found: dict[str, set[str]] = {}
    back: dict[str, set[str]] = {}
    waiting = list(dict.fromkeys(holders))
    seen = set(waiting)
    while waiting:
        baseline, candidate = waiting.pop()
        if not baseline or not candidate:
            continue  # the root, which is the root of the other run
        found.setdefault(baseline, set()).add(candidate)
        back.setdefault(candidate, set()).add(baseline)
        above = _parent(baseline), _parent(candidate)
        if above not in seen:
            seen.add(above)
            waiting.append(above)
    return {
        baseline: next(iter(others))
        for baseline, others in found.items()
        if len(others) == 1 and len(back[next(iter(others))]) == 1
    }
