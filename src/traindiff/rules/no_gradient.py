"""Parameters that an optimizer holds and that no step gives a gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from traindiff.findings import Finding
from traindiff.merging.finding_at import finding_at
from traindiff.merging.step_table import Entry, Key
from traindiff.observation import NO_GRADIENT
from traindiff.rules.rule import Limit, Rule
from traindiff.rules.stepping import moves_parameters


@dataclass(slots=True, kw_only=True)
class _Without:
    """A parameter without a gradient so far."""

    entry: Entry
    first: int
    num_none: int = 0
    num_zero: int = 0


class GradientsArrive(Rule):
    """Parameters whose gradient is None, or 0 in every element, in every step in which something could move.

    Often it is meant (a pooler that a task does not use, an expert that is never chosen), so it is a warning; or
    something was detached, computed under `no_grad`, or multiplied by 0.
    """

    name = "no-gradient"
    finds = "A parameter that an optimizer holds gets no gradient in any step, or nothing but zeros."
    kinds = ("no-gradient",)
    warns = True
    tells_runs_apart = False
    limits: ClassVar[Mapping[str, Limit]] = {
        "least_steps": Limit(default=5, says="steps that must have passed; heads of zeros give gradients after one"),
    }

    def begin(self) -> None:
        """See `Rule.begin`."""
        self._without: dict[str, _Without] = {}
        self._seen: set[str] = set()

    def step(self, table: Mapping[Key, Entry], *, step: int) -> tuple[Finding, ...]:
        """Takes note of the step."""
        moves = moves_parameters(table)
        for key, entry in table.items():
            if key[:2] != ("grad", "") or key.path in self._seen:
                continue
            none = entry.unobserved.startswith(NO_GRADIENT)
            count = 0 if entry.unobserved else int(entry.summary["count"])
            zero = bool(count) and int(entry.summary["zero"]) == count
            if not none and not zero:  # also what is not known, and what has no elements
                self._seen.add(key.path)
                self._without.pop(key.path, None)
            elif moves:
                one = self._without.setdefault(key.path, _Without(entry=entry.without_parts(), first=step))
                one.num_none += none
                one.num_zero += zero
        return ()

    def end(self) -> Iterator[Finding]:
        """See the class."""
        for path, one in self._without.items():
            steps = one.num_none + one.num_zero
            if steps < self.limit("least_steps"):
                continue
            what = (
                f"is 0 in every element in {one.num_zero} of {steps} steps, and None in the others"
                if one.num_zero
                else f"is None in all of {steps} steps"
            )
            says = (
                f"{path} gets no gradient: it {what}. Look for detach(), no_grad(), zero_grad() before the step, and "
                "results that the loss does not use; if it is meant, requires_grad=False says so."
            )
            evidence = {"none": one.num_none, "zero": one.num_zero, "num_steps": steps}
            yield finding_at(one.entry, step=one.first, kind="no-gradient", says=says, evidence=evidence)
