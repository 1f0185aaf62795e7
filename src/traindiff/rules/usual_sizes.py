"""How large each tensor of a training usually is, so that what moved first can be named when something jumps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from traindiff.merging.step_table import Entry, Key
from traindiff.summary import norm, number

MEMORY = 0.1
"""Weight of a new size in what is usual: about the last ten steps count."""

LEAST_STEPS = 8
"""Steps after which it is known what is usual."""

FACTOR = 3.0
"""What is this many times as large as usual, or as small, has moved..."""

TIMES = 6.0
"""...if it is also so many times as far from it as it usually is."""

_WITHIN = frozenset({"batch", "forward", "backward", "grad"})


@dataclass(slots=True, kw_only=True)
class _Usual:
    """Logarithm of the size of a tensor, its usual distance from that, and for how many steps it was seen."""

    size: float
    distance: float = 0.0
    num_steps: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A tensor that is not as large as usual: of which step, which tensor, and how many times as large."""

    step: int
    entry: Entry
    factor: float


class UsualSizes:
    """Follows the sizes of all tensors; keeps two numbers for each site."""

    def __init__(self) -> None:
        self._usual: dict[Key, _Usual] = {}

    def see(self, table: Mapping[Key, Entry], *, step: int) -> tuple[Moved | None, Moved | None]:
        """Take note of a step.

        Returns:
            The first tensor that has moved of what a step computes (batch, activations, gradients), and of what
            it does with that (learning rate, updates).
        """
        computed: Moved | None = None
        done: Moved | None = None
        for key, entry in table.items():
            within = key.phase in _WITHIN
            rate = bool(key.group) and key.slot == "lr"
            if key.stage or entry.unobserved or not (within or rate or key.phase == "update"):
                continue
            size = abs(number(entry.summary)) if rate else _size(entry)
            if not size or not math.isfinite(size):
                continue
            factor = self._factor(key, math.log(size))
            if factor == 1.0:
                continue
            moved = Moved(step=step, entry=entry.without_parts(), factor=factor)
            if within:
                computed = computed or moved
            else:
                done = done or moved
        return computed, done

    def _factor(self, key: Key, size: float) -> float:
        """How many times as large as usual something is; 1 where that is not unusual."""
        usual = self._usual.get(key)
        if usual is None:
            self._usual[key] = _Usual(size=size)
            return 1.0
        away = size - usual.size
        unusual = abs(away) > max(math.log(FACTOR), TIMES * usual.distance)
        known = usual.num_steps >= LEAST_STEPS
        usual.num_steps += 1
        usual.size += MEMORY * away
        usual.distance += MEMORY * (abs(away) - usual.distance)
        return math.exp(min(away, 700.0)) if known and unusual else 1.0


def _size(entry: Entry) -> float:
    """Root mean square, so that a batch with fewer samples is no smaller."""
    count = int(entry.summary["count"])
    return float(norm(entry.summary)) / math.sqrt(count) if count else 0.0
