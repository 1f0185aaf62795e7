"""Where each optimizer of a run goes on that continues another one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest

from traindiff.analyse.align.continuation import other_offsets

Iteration = str
"""Names of the optimizers that step in it, one letter each, in their order."""


class Run:
    """Stands for a recording: its steps in their order. Those of G are recorded while a step of D is that is chosen."""

    def __init__(
        self, iterations: Iterable[Iteration], *, first: int = 0, recorded: Iterable[int] | None = None
    ) -> None:
        self.run = {"first_step": first}
        self.ranks = (0,)
        chosen = None if recorded is None else frozenset(recorded)
        counts: dict[str, int] = {}
        begun: dict[str, int] = {}
        self._order: list[tuple[str, int, Mapping[str, int]]] = []
        for name in "".join(iterations):
            number = counts.get(name, first)
            counts[name] = number + 1
            if chosen is not None and (number if name == "D" else counts.get("D", first)) not in chosen:
                continue
            self._order.append((name, number, {other: one for other, one in begun.items() if other != name}))
            begun[name] = number
        self._names = sorted(counts)

    def rank_content(self, rank: int) -> dict[str, Any]:
        return {"optimizers": [{"name": name} for name in self._names]}

    def order(self) -> Iterator[tuple[str, int, Mapping[str, int]]]:
        yield from self._order


def every(number: int) -> range:
    return range(0, 1000, number)


SLOW = ["DG" if n % 2 == 0 else "D" for n in range(12)]
"""G steps in every second iteration."""

SLOW_FIRST = ["GD" if n % 2 == 0 else "D" for n in range(12)]

LATE = ["DG" if n >= 60 else "D" for n in range(80)]
"""G begins late."""

ONCE = ["D" if n == 1 else "DG" for n in range(12)]
"""G was left out once."""


@pytest.mark.parametrize(
    ("baseline", "candidate", "offset", "expected"),
    [
        (Run(["DG"] * 12), Run(["DG"] * 7), 5, {}),
        (Run(["DG"] * 12), Run(["DG"] * 7, first=5), 0, {}),
        (Run(["DG"] * 12), Run(["GD"] * 7), 5, {}),  # another order is no other number
        (Run(["GD"] * 12), Run(["DG"] * 7), 5, {}),
        (Run(["D"] * 12), Run(["D"] * 7), 5, {}),
        (Run(SLOW), Run(SLOW[3:]), 3, {"G": 2}),
        (Run(SLOW), Run(SLOW[3:], first=3), 0, {"G": -1}),
        (Run(SLOW), Run(SLOW[4:]), 4, {"G": 2}),
        (Run(SLOW[4:]), Run(SLOW), -4, {"G": -2}),  # the baseline begins in the middle
        (Run(SLOW), Run(SLOW[4:], recorded=every(3)), 4, {"G": 2}),
        (Run(SLOW, recorded=every(3)), Run(SLOW[4:]), 4, {"G": 2}),
        (Run(SLOW_FIRST), Run(SLOW_FIRST[3:]), 3, {"G": 2}),
        (Run(SLOW_FIRST), Run(SLOW_FIRST[4:]), 2, {"D": 4}),
        (Run(ONCE), Run(ONCE[5:]), 5, {"G": 4}),
        (Run(LATE), Run(LATE[50:]), 50, {"G": 0}),
        (Run(LATE), Run(LATE[70:]), 70, {"G": 10}),
        (Run(["DG"] * 200, recorded=every(10)), Run(["DG"] * 100, first=100, recorded=every(10)), 0, {}),
        (Run(["DG"] * 200, recorded=every(10)), Run(["DG"] * 100, recorded=every(10)), 100, {}),
        (Run(["DG"] * 200, recorded=[0, 1, 2, *range(100, 110)]), Run(["DG"] * 20, first=100), 0, {}),
        (Run(SLOW), Run(SLOW, recorded=range(6, 12)), 0, {}),  # its numbers are those of a run from its beginning
        (Run(SLOW), Run(SLOW), 0, {}),
    ],
)
def test_each_optimizer_goes_on_where_it_was(
    baseline: Run, candidate: Run, offset: int, expected: dict[str, int]
) -> None:
    assert other_offsets(baseline, candidate, offset) == expected  # type: ignore[arg-type]
