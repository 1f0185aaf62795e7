"""The dataflow around a finding: the sites before it, its own site, and the sites after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from traindiff.analyse.findings import Finding, SiteWord, phase_text
from traindiff.core.site import label
from traindiff.present.page.sites import SiteRow, place_of

FLOW = ("batch", "forward", "loss", "backward")
"""Phases in which data flows from one site to the next in the order of execution."""

BEFORE, AFTER = 3, 2
"""Numbers of sites that are shown before and after a finding, in the order of execution."""

MOST = 4
"""Most sites that are shown above each other."""

Measure = Callable[[int], tuple[float, float, SiteWord | None]]
"""Gives difference, noise floor and word of a row in the finding's step; no word where it was not compared."""

Status = SiteWord | Literal["not compared"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One site of the picture.

    Attributes:
        row: Its row on the page.
        phase: Phase and stage.
        site: The site as people read it.
        shape: Shape of the baseline's tensor.
        status: Its word, or that it was not compared.
        size: Difference and floor in words.
        first: True for the site of the finding.
    """

    row: int
    phase: str
    site: str
    shape: str
    status: Status
    size: str
    first: bool

    @property
    def style(self) -> str:
        """The name of its look: what is unknown looks alike."""
        return "unknown" if self.status.startswith("not ") else self.status


def dataflow(finding: Finding, rows: Sequence[SiteRow], measure: Measure) -> list[list[Node]]:
    """The sites around a finding, from its inputs to its consequences.

    Activations and their gradients stand in the order of execution. The gradient of a parameter follows from what its
    module received and from the gradient of what it returned; optimizer state and update follow from it.

    Args:
        finding: The first finding.
        rows: Rows of the page, in execution order.
        measure: Difference, noise floor and word of a row, in the finding's step.

    Returns:
        Columns of nodes; empty where the finding's site has no row.
    """
    here = next((at for at, row in enumerate(rows) if row.place == place_of(finding)), None)
    if here is None:
        return []
    around = _in_order(here, rows) if finding.phase in FLOW else _of_parameter(here, rows)
    return [[_node(at, rows[at], measure(at), first=at == here) for at in column] for column in around if column]


def _in_order(here: int, rows: Sequence[SiteRow]) -> list[list[int]]:
    flowing = sorted(
        (at for at, row in enumerate(rows) if row.place[0] in FLOW and row.place[3] != "logged"),
        key=lambda at: rows[at].order,
    )
    if here not in flowing:
        return [[here]]
    place = flowing.index(here)
    phases = [FLOW.index(rows[at].place[0]) for at in flowing]
    first, last = place, place
    # Nothing flows from a backward pass into a batch: there the next forward pass begins, of another model perhaps.
    while first > max(0, place - BEFORE) and phases[first - 1] <= phases[first]:
        first -= 1
    while last < min(len(flowing) - 1, place + AFTER) and phases[last] <= phases[last + 1]:
        last += 1
    return [[at] for at in flowing[first : last + 1]]


def _of_parameter(here: int, rows: Sequence[SiteRow]) -> list[list[int]]:
    phase, _, path, _, _ = rows[here].place
    module = path.rpartition(".")[0]
    returned = [at for at, row in enumerate(rows) if row.place[0] == "forward" and row.place[2] == module]
    backward = [at for at, row in enumerate(rows) if row.place[0] == "backward" and row.place[2] == module]
    received: list[int] = []
    if returned:
        order = rows[returned[0]].order
        received = [at for at, row in enumerate(rows) if row.place[0] in ("batch", "forward") and row.order < order]
        received = sorted(received, key=lambda at: rows[at].order)[-1:]
    same = {name: _at(rows, name, path) for name in ("grad", "optimizer", "update")}
    same["optimizer"].sort(key=lambda at: rows[at].shapes[0] == ())  # counters last
    before = [at for at in same["grad"] if at < here] if phase == "grad" else []
    columns = [[*received, *backward[:1]], *([at] for at in before[-2:])]
    if phase == "grad":
        return [*columns, [here], same["optimizer"][:MOST], same["update"][:1]]
    columns.append(same["grad"][-1:])
    if phase == "optimizer":
        others = [at for at in same["optimizer"] if at != here]
        return [*columns, [here, *others[: MOST - 1]], same["update"][:1]]
    return [*columns, same["optimizer"][:MOST], [here]]


def _at(rows: Sequence[SiteRow], phase: str, path: str) -> list[int]:
    return [at for at, row in enumerate(rows) if row.place[0] == phase and row.place[2] == path]


def _node(at: int, row: SiteRow, measured: tuple[float, float, SiteWord | None], *, first: bool) -> Node:
    phase, stage, path, slot, call = row.place
    difference, floor, word = measured
    return Node(
        row=at,
        phase=phase_text(phase, stage),
        site=label(path, slot) + (f" call {call}" if call else ""),
        shape=" x ".join(map(str, row.shapes[0])) or "scalar",
        status=word or "not compared",
        size=_size(difference, floor, word),
        first=first,
    )


def _size(difference: float, floor: float, word: SiteWord | None) -> str:
    if word is None:
        return "not compared"
    if word == "identical":
        return "same bits"
    size = "differs" if math.isinf(difference) else f"{difference:.2g}"
    if math.isinf(floor):
        return f"{size}, {word}"
    if not floor or math.isinf(difference):
        return size
    ratio = f"{difference:.2g} = {difference / floor:.2g} x floor"
    return f"{ratio}, follows" if word == "follows" else ratio


def message(column: Iterable[Node]) -> str:
    """A column of the picture in words, for screen readers."""
    return "; ".join(f"{node.phase} {node.site}: {node.status}, {node.size}" for node in column)
