"""The moments that an optimizer of Adam's kind keeps of each parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.finding_at import finding_at
from traindiff.analyse.merge.step_table import Entry, Key
from traindiff.analyse.rules.rule import InARow, Limit, Rule
from traindiff.core.summary import largest, number


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """What an optimizer keeps of one parameter: means of its gradients and of their squares."""

    first: Entry
    second: Entry

    @property
    def path(self) -> str:
        """Path of the parameter."""
        return self.second.key.path

    @property
    def count(self) -> int:
        """Number of its elements."""
        return int(self.second.summary["count"])


def moments_of(table: Mapping[Key, Entry]) -> Iterator[Moments]:
    """The moments of a step that are known."""
    for key, second in table.items():
        if key.phase != "optimizer" or key.slot != "exp_avg_sq" or second.unobserved or not second.exact:
            continue
        first = table.get(key._replace(slot="exp_avg"))
        if first is not None and not first.unobserved and first.exact:
            yield Moments(first=first, second=second)


_ALL = "all"


class SecondMomentsHold(Rule):
    """A part of all elements whose first moment is not 0 and whose second moment is 0, or subnormal.

    Adam divides by the root of the second moment. Where the square of a gradient is lost (below 1e-23 of it in float32,
    below 2e-4 in float16), what is left to divide by is eps, and the update is as large as lr x gradient / eps. Single
    parameters may have gradients that are mathematically 0, so elements of all parameters are counted together.
    """

    name = "zero-second-moment"
    finds = "Adam's second moments are 0 where gradients are not."
    kinds = ("zero-second-moment",)
    tells_runs_apart = False
    limits: ClassVar[Mapping[str, Limit]] = {
        "share": Limit(default=0.1, message="largest share of all elements with a first moment"),
        "least_steps": Limit(default=5, message="steps in a row in which it must be so"),
    }

    def begin(self) -> None:
        """See `Rule.begin`."""
        self._in_a_row: InARow[str, tuple[Entry, float]] = InARow(self.limit("least_steps"))

    def step(self, table: Mapping[Key, Entry], *, step: int) -> tuple[Finding, ...]:
        """Takes note of the step."""
        moving = lost = most = 0
        worst: Entry | None = None
        for one in moments_of(table):
            resting = int(one.first.summary["zero"])
            degenerate = int(one.second.summary["zero"]) + int(one.second.summary["subnormal"])
            own = max(0, degenerate - resting)
            moving += one.count - resting
            lost += own
            if own > most:
                most, worst = own, one.second
        if moving:
            found = {}
            if worst is not None and lost > self.limit("share") * moving:
                found[_ALL] = (worst.without_parts(), lost / moving)
            self._in_a_row.see(found, step=step)
        return ()

    def end(self) -> Iterator[Finding]:
        """See the class."""
        for _, (entry, share), first, num_steps in self._in_a_row:
            message = (
                f"{share:.0%} of all elements have a gradient whose square is lost: their second moment is 0 or "
                f"subnormal in {entry.dtype}, most of them in {entry.key.path}, in {num_steps} steps. Adam then "
                "divides by eps alone. Keep its state in float32, or scale the loss up."
            )
            evidence = {"share": share, "num_steps": num_steps}
            yield finding_at(entry, step=first, kind="zero-second-moment", message=message, evidence=evidence)


class EpsIsSmall(Rule):
    """Parameters whose largest root of the second moment is below eps, where they are most of a model.

    Then Adam is gradient descent with the learning rate lr / eps. Biases before a normalization, and keys of attention,
    have gradients that are 0 but for rounding, and a model that fits its data perfectly has them everywhere; so it is
    asked of more than half of all elements, and is a warning.
    """

    name = "eps-dominates"
    finds = "Adam's eps is larger than the roots of most second moments."
    kinds = ("eps-dominates",)
    warns = True
    tells_runs_apart = False
    limits: ClassVar[Mapping[str, Limit]] = {
        "share": Limit(default=0.5, message="largest share of all elements that such parameters may have"),
        "least_steps": Limit(default=10, message="steps in a row in which it must be so"),
    }

    def begin(self) -> None:
        """See `Rule.begin`."""
        self._in_a_row: InARow[str, tuple[Entry, float, float, float]] = InARow(self.limit("least_steps"))

    def step(self, table: Mapping[Key, Entry], *, step: int) -> tuple[Finding, ...]:
        """Takes note of the step."""
        elements = small = most = 0
        worst: tuple[Entry, float, float] | None = None
        for one in moments_of(table):
            eps = self._setting(table, one.path, "eps")
            if eps is None or not float(one.second.summary["maximum"]) > 0.0:
                continue
            size = math.sqrt(float(largest(one.second.summary)) / self._correction(table, one.path))
            elements += one.count
            if size < eps:
                small += one.count
                if one.count > most:
                    most, worst = one.count, (one.second, size, eps)
        if elements:
            found = {}
            if worst is not None and small > self.limit("share") * elements:
                found[""] = (worst[0].without_parts(), *worst[1:], small / elements)
            self._in_a_row.see(found, step=step)
        return ()

    def _setting(self, table: Mapping[Key, Entry], path: str, slot: str) -> float | None:
        """A setting of the first group that holds a parameter."""
        for group in sorted(self.facts.held_in.get(path, ())):
            entry = table.get(Key("optimizer", "", group, slot, 0, 0))
            if entry is not None and not entry.unobserved:
                return number(entry.summary)
        return None

    def _correction(self, table: Mapping[Key, Entry], path: str) -> float:
        """What the second moment is divided by, because it began at 0; 1 where that is not known."""
        beta = self._setting(table, path, "betas[1]")
        steps = table.get(Key("optimizer", "", path, "step", 0, 0))
        if beta is None or steps is None or steps.unobserved or not 0.0 < beta < 1.0:
            return 1.0
        return float(1.0 - beta ** max(1.0, number(steps.summary)))

    def end(self) -> Iterator[Finding]:
        """See the class."""
        for _, (entry, size, eps, share), first, num_steps in self._in_a_row:
            message = (
                f"eps = {eps:g} is larger than the root of every second moment in parameters that hold {share:.0%} of "
                f"all elements, in {num_steps} steps: {entry.key.path} has {size:.2g} at most. Adam then does not "
                "adapt. Use a smaller eps, or look at why gradients are so small."
            )
            evidence = {"eps": eps, "largest_root": size, "share": share, "num_steps": num_steps}
            yield finding_at(entry, step=first, kind="eps-dominates", message=message, evidence=evidence)
