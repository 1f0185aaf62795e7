"""What compiled code contributed to gradients, against what the layers in it should contribute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.site import finding_at
from traindiff.analyse.merge.witnessed import AGREES, Witnessed

_APART = 4.0 * AGREES
"""Multiple of what rounding explains from which on a contribution is certainly another one."""


class CompiledCode:
    """Contributions that were right in other steps.

    Compiled code may use a parameter beside the calls of layers in it, and no graph shows that. Where both agree in one
    step, there is no such use in that step. A difference in another step is told, and may be such a use.
    """

    def __init__(self) -> None:
        self._right: set[str] = set()
        self._wrong: dict[str, Finding] = {}  # the first of each parameter

    def see(self, found: Sequence[Witnessed], *, step: int, kind: str) -> None:
        """Look at the gradients of a step."""
        for one in found:
            path, worst = one.entry.key.path, one.worst_in_compiled
            if worst is None:
                continue
            if worst.error <= AGREES * worst.allowed:
                self._right.add(path)
            elif worst.error > _APART * worst.allowed and path not in self._wrong:
                size = one.size or 1.0
                self._wrong[path] = finding_at(
                    one.entry, step=step, kind=kind, rank=worst.rank, micro_step=worst.micro_step,
                    message="What compiled code contributed to the gradient is not what the inputs and outputs of its "
                    f"layer give: relative error {worst.error / size:.2g}; rounding explains "
                    f"{worst.allowed / size:.1g}. In other steps it was. Did it compute this wrongly, or use the "
                    "parameter in another way, too?",
                    difference=worst.error / size, floor=AGREES * worst.allowed / size,
                    evidence={"cause": "compiled", "factor": 1.0, "edited": one.edited, "may_be_meant": True},
                )  # fmt: skip

    def left(self) -> Iterator[Finding]:
        """The differences in parameters that compiled code used in no other way in another step."""
        yield from (one for path, one in self._wrong.items() if path in self._right)
