"""The state of optimizers of Adam's kind: means of the gradients and of their squares."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable
from traindiff.analyse.rules.rule import Found, Limit, Repeated, RepeatedRule
from traindiff.core.summary import largest, number


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamState:
    """An optimizer's state of one parameter: the means of its gradients and of their squares."""

    first: MergedSite
    second: MergedSite

    @property
    def path(self) -> str:
        """Path of the parameter."""
        return self.second.key.path

    @property
    def count(self) -> int:
        """Number of its elements."""
        return int(self.second.summary["count"])


def adam_states(table: StepTable) -> Iterator[AdamState]:
    """The states of a step that are known."""
    for key, second in table.items():
        if key.phase != "optimizer" or key.slot != "exp_avg_sq" or second.unobserved or not second.exact:
            continue
        first = table.get(key._replace(slot="exp_avg"))
        if first is not None and not first.unobserved and first.exact:
            yield AdamState(first=first, second=second)


class SecondMomentsHold(RepeatedRule):
    """Many elements have a nonzero first moment and a second moment that is 0, or subnormal.

    Adam divides by the root of the second moment. If the square of a gradient is lost (below 1e-23 in float32, below
    2e-4 in float16), only eps is left to divide by, and the update is as large as lr x gradient / eps. Single
    parameters may have gradients that are mathematically 0, so elements of all parameters are counted together.
    """

    name = "zero-second-moment"
    finds = "Adam's second moments are 0 where gradients are not."
    limits: ClassVar[Mapping[str, Limit]] = {
        "share": Limit(default=0.1, message="largest share of all elements with a first moment"),
        "least_steps": Limit(default=5, message="steps in a row in which it must be so"),
    }

    def _wrong(self, table: StepTable) -> Found | None:
        moving = lost = most = 0
        worst: MergedSite | None = None
        for one in adam_states(table):
            resting = int(one.first.summary["zero"])
            degenerate = int(one.second.summary["zero"]) + int(one.second.summary["subnormal"])
            own = max(0, degenerate - resting)
            moving += one.count - resting
            lost += own
            if own > most:
                most, worst = own, one.second
        if not moving:
            return None
        return {"": (worst, {"share": lost / moving})} if worst and lost > self.limit("share") * moving else {}

    def _message(self, row: Repeated) -> str:
        return (
            f"{row.numbers['share']:.0%} of all elements have a gradient whose square is lost: their second moment is "
            f"0 or subnormal in {row.site.dtype}, most of them in {row.site.key.path}, in {row.num_steps} steps. Adam "
            "then divides by eps alone. Keep its state in float32, or scale the loss up."
        )


class EpsIsSmall(RepeatedRule):
    """In most of a model, the largest root of a parameter's second moment is below eps.

    Then Adam is gradient descent with the learning rate lr / eps. Biases before a normalization, and keys of attention,
    have gradients that are 0 but for rounding, and a model that fits its data perfectly has them everywhere. So the
    rule asks for more than half of all elements, and is a warning.
    """

    name = "eps-dominates"
    finds = "Adam's eps is larger than the roots of most second moments."
    warns = True
    limits: ClassVar[Mapping[str, Limit]] = {
        "share": Limit(default=0.5, message="largest share of all elements that such parameters may have"),
        "least_steps": Limit(default=10, message="steps in a row in which it must be so"),
    }

    def _wrong(self, table: StepTable) -> Found | None:
        elements = small = most = 0
        worst: tuple[MergedSite, float, float] | None = None
        for one in adam_states(table):
            eps = self._setting(table, one.path, "eps")
            if eps is None or not float(one.second.summary["maximum"]) > 0.0:
                continue
            root = math.sqrt(float(largest(one.second.summary)) / self._correction(table, one.path))
            elements += one.count
            if root < eps:
                small += one.count
                if one.count > most:
                    most, worst = one.count, (one.second, eps, root)
        if not elements:
            return None
        if worst is None or small <= self.limit("share") * elements:
            return {}
        site, eps, root = worst
        return {"": (site, {"eps": eps, "largest_root": root, "share": small / elements})}

    def _message(self, row: Repeated) -> str:
        numbers = row.numbers
        return (
            f"eps = {numbers['eps']:g} is larger than the root of every second moment in parameters that hold "
            f"{numbers['share']:.0%} of all elements, in {row.num_steps} steps: {row.site.key.path} has "
            f"{numbers['largest_root']:.2g} at most. Adam then does not adapt. Use a smaller eps, or look at why "
            "gradients are so small."
        )

    def _setting(self, table: StepTable, path: str, slot: str) -> float | None:
        """A setting of the first group that holds a parameter."""
        for group in sorted(self.facts.held_in.get(path, ())):
            entry = table.get(SiteKey("optimizer", "", group, slot))
            if entry is not None and not entry.unobserved:
                return number(entry.summary)
        return None

    def _correction(self, table: StepTable, path: str) -> float:
        """The bias correction of the second moment; 1 where it is not known."""
        beta = self._setting(table, path, "betas[1]")
        steps = table.get(SiteKey("optimizer", "", path, "step"))
        if beta is None or steps is None or steps.unobserved or not 0.0 < beta < 1.0:
            return 1.0
        return float(1.0 - beta ** max(1.0, number(steps.summary)))
