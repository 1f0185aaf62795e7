"""Where an operator runs: in which call of which module, forward or backward."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Any

from traindiff.taps._torch_compat import next_node_number, node_number
from traindiff.taps.source_line import SourceLine


@dataclass(slots=True, kw_only=True)
class ModuleCall:
    """One call of a module whose operators are recorded.

    Attributes:
        path: Canonical path of the module.
        stage: Of what is observed in it.
        call: How often the module had been called before in the micro-step.
        counts: Operators so far, by phase and name.
    """

    path: str
    stage: str
    call: int
    counts: dict[tuple[str, str], int] = field(default_factory=dict)

    def next_number(self, phase: str, name: str) -> int:
        """How many operators of this name the call has had before."""
        number = self.counts.get((phase, name), 0)
        self.counts[phase, name] = number + 1
        return number


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What has made a node of the graph.

    Attributes:
        inside: The call of a module; None outside of those whose operators are recorded.
        operator: Path of the operator.
        source: Where it was called from.
    """

    inside: ModuleCall | None
    operator: str = ""
    source: SourceLine | None = None


class GraphNodes:
    """Which call of a module has made which nodes of autograd's graph, in one step.

    Nodes are told by their numbers, which count up while a forward pass makes them: nothing is attached to the graph,
    and nothing of it is kept. What lies between two noted numbers (a copy into a slice makes its node after it ran)
    belongs to the first.
    """

    def __init__(self) -> None:
        self._first: list[int] = []
        self._made: list[Made] = []

    def __bool__(self) -> bool:
        return bool(self._made)

    def note(self, made: Made) -> None:
        """An operator is running, whose node autograd has made just now, if it makes one."""
        number = next_node_number() - 1
        if not self._first or number > self._first[-1]:
            self._first.append(number)
            self._made.append(made)

    def outside(self) -> None:
        """The nodes from here on are made by what is not recorded."""
        number = next_node_number()
        if self._first and number > self._first[-1]:
            self._first.append(number)
            self._made.append(Made(inside=None))

    def find(self, node: Any) -> Made | None:
        """What has made a node; None for what is not recorded: other nodes, and those that accumulate gradients."""
        number = node_number(node)
        place = bisect_right(self._first, number) - 1
        if place < 0 or number >= 1 << 63:
            return None
        made = self._made[place]
        return made if made.inside is not None else None

    def clear(self) -> None:
        """The step has ended."""
        self._first.clear()
        self._made.clear()
