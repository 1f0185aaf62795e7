"""What compiled code contributed to gradients, against what the layers in it should contribute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from traindiff.analyse.merge.witnessed import AGREES, Witnessed, rms

_APART = 4.0 * AGREES
"""Multiple of what rounding explains from which on a contribution is certainly another one."""


class CompiledCode:
    """Contributions that were right in most steps.

    Compiled code may use a parameter beside the calls of layers in it, and no graph shows that. Where both agree, there
    is no such use. A difference in few steps is told in a note: it may be such a use, whose gradient is zero in others.
    """

    def __init__(self) -> None:
        self._right: Counter[str] = Counter()
        self._wrong: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def see(self, found: Sequence[Witnessed], *, step: int) -> None:
        """Look at the gradients of a step."""
        for one in found:
            path, worst = one.entry.key.path, one.worst_in_compiled
            if worst is None or not rms(one.expected):
                continue
            if worst.error <= AGREES * worst.allowed:
                self._right[path] += 1
            elif worst.error > _APART * worst.allowed:
                self._wrong[path] += 1
                if path not in self._first:
                    rank = "" if worst.rank is None else f", rank {worst.rank}"
                    micro_step = f", micro-step {worst.micro_step}" if len(one.terms) > 1 else ""
                    self._first[path] = (
                        f"step {step}{micro_step}{rank}: relative error {worst.error / one.size:.2g}; rounding "
                        f"explains {worst.allowed / one.size:.1g}"
                    )

    def notes(self) -> Iterator[str]:
        """A sentence about each parameter to which compiled code seldom contributed something else."""
        for path, first in self._first.items():
            right, wrong = self._right[path], self._wrong[path]
            others = f"{right} other{'s' if right > 1 else ''}"
            if wrong < right:
                steps, at = ("a step", "") if wrong == 1 else (f"{wrong} steps", "first ")
                yield (
                    f"In {steps}, compiled code contributed something else to the gradient of {path} than the inputs "
                    f"and outputs of its layer give, unlike in {others} ({at}{first}). It "
                    "computed this wrongly, or a hook on the output or another use of the parameter changed it there."
                )
