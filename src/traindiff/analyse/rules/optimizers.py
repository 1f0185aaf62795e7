"""Learning rates of a step, whether a loss scaler left the step out, and the state of optimizers of Adam's kind."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.indexed import once, sites
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable, is_loss_scale
from traindiff.analyse.rules.rule import Contents, Found, Limit, Repeated, RepeatedRule, Rule, RunFacts
from traindiff.core.observation import SKIPPED
from traindiff.core.summary import SMALLEST_NORMAL, is_finite, largest, number

SCHEDULED = "initial_lr"
"""Setting that torch's schedulers write into the groups of an optimizer when they are made."""


@dataclass(slots=True, kw_only=True)
class _Rate:
    entry: MergedSite
    value: float
    first: int
    num_steps: int = 0


class ScheduleIsFollowed(Rule):
    """The learning rate of groups with a torch scheduler never changes.

    A scheduler writes `initial_lr` into the groups of its optimizer. If nobody calls the scheduler's `step`, the
    learning rate stays the same. It also stays the same under a constant schedule, and until the first epoch ends, so
    the rule only warns.
    """

    name = "unchanged-learning-rate"
    finds = "The learning rate never changes, although there is a scheduler."
    needs = "a scheduler of torch"
    warns = True
    limits: ClassVar[Mapping[str, Limit]] = {
        "least_steps": Limit(default=200, message="steps that a run must have; schedules by epoch wait for long"),
    }

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return SCHEDULED in contents.slots

    def begin(self) -> None:
        """Nothing was seen so far."""
        self._rates: dict[str, _Rate] = {}
        self._changing: set[str] = set()

    def step(self, table: StepTable, *, step: int) -> None:
        """Note a step; the findings come at the end."""
        for key, entry in sites(table, "optimizer"):
            if (
                key.slot != "lr"
                or not key.group
                or key.path in self._changing
                or key._replace(slot=SCHEDULED) not in table
            ):
                continue
            value = number(entry.summary)
            rate = self._rates.get(key.path)
            if rate is None:
                rate = self._rates[key.path] = _Rate(entry=entry.without_parts(), value=value, first=step)
            if rate.value != value:
                self._changing.add(key.path)
                del self._rates[key.path]
            rate.num_steps += 1

    def end(self) -> Iterator[Finding]:
        """Findings of the whole run."""
        for path, rate in self._rates.items():
            if rate.num_steps < self.limit("least_steps"):
                continue
            message = (
                f"The learning rate of {path} is {rate.value:g} in all of {rate.num_steps} steps, although a scheduler "
                "was made for it. Does anything call scheduler.step()?"
            )
            yield self.finding(rate.entry, message, step=rate.first, learning_rate=rate.value, num_steps=rate.num_steps)


@once
def may_be_left_out(table: StepTable) -> bool:
    """True if a loss scaler left the step out, or may have: it does so if any gradient is not finite."""
    gradients = (entry for _, entry in sites(table, "grad", stage="") if not entry.unobserved)
    return _is_marked(table) or not all(is_finite(entry.summary) for entry in gradients)


def _is_marked(table: StepTable) -> bool:
    """True if it is recorded that a loss scaler left the step out."""
    return any(key.slot == SKIPPED for key, _ in sites(table, "optimizer"))


def is_left_out(table: StepTable) -> bool:
    """True if a loss scaler left the step out: it is marked, or there is a scale and a gradient is not finite.

    A fused optimizer leaves steps out itself, and sets no mark.
    """
    return _is_marked(table) or (has_loss_scale(table) and may_be_left_out(table))


@once
def has_loss_scale(table: StepTable) -> bool:
    """True if the loss of the step was multiplied by a loss scale."""
    return any(is_loss_scale(key) for key, _ in sites(table, "loss"))


@once
def learning_rates(table: StepTable) -> Mapping[str, float]:
    """Learning rates by the path of their group."""
    return {
        key.path: number(entry.summary)
        for key, entry in sites(table, "optimizer", stage="")
        if key.slot == "lr" and key.group and not (key.call or key.micro_step)
    }


def largest_rate(path: str, rates: Mapping[str, float], facts: RunFacts) -> float:
    """The largest learning rate of the groups that hold a parameter; 0 where none was recorded."""
    return max((rates.get(group, 0.0) for group in facts.held_in.get(path, ())), default=0.0)


@once
def optimizer_of(table: StepTable) -> str:
    """Name of the optimizer that took a step, as the paths of its groups have it."""
    return min(learning_rates(table), default="optimizer").rpartition(".groups[")[0]


@once
def moves_parameters(table: StepTable) -> bool:
    """True if the optimizer was to move anything: no loss scaler left the step out, and some learning rate is not 0.

    If no learning rate was recorded, it is assumed to be set.
    """
    rates = learning_rates(table)
    return not may_be_left_out(table) and (not rates or any(rates.values()))


class LearningRateIsSet(RepeatedRule):
    """The learning rates of all groups of an optimizer are 0 for several steps in a row: nothing moves.

    A warm-up begins at 0 for one step, and a decay may end there. Single groups may stay at 0.
    """

    name = "zero-learning-rate"
    finds = "All learning rates are 0, step after step."
    needs = "learning rates"
    limits: ClassVar[Mapping[str, Limit]] = {
        "least_steps": Limit(default=10, message="steps in a row in which it must be so; warm-ups begin with one"),
    }

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return "lr" in contents.slots

    def _wrong(self, table: StepTable) -> Found | None:
        rates = learning_rates(table)
        if not rates:
            return None
        path = min(rates)
        return {} if any(rates.values()) else {path: (table[SiteKey("optimizer", "", path, "lr")], {})}

    def _series(self, table: StepTable) -> str:
        return optimizer_of(table)

    def _message(self, row: Repeated) -> str:
        return (
            f"The learning rate is 0 in {row.num_steps} steps in a row, from step {row.first} on: nothing is learned. "
            "Look at the schedule: does it end before the training, and does anything step it?"
        )


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


@once
def adam_states(table: StepTable) -> Sequence[AdamState]:
    """The states of a step that are known."""
    found = []
    for key, second in sites(table, "optimizer"):
        if key.slot != "exp_avg_sq" or second.unobserved or not second.exact:
            continue
        first = table.get(key._replace(slot="exp_avg"))
        if first is not None and not first.unobserved and first.exact:
            found.append(AdamState(first=first, second=second))
    return found


class SecondMomentsHold(RepeatedRule):
    """Many elements have a nonzero first moment and a second moment that is 0, or subnormal.

    Adam divides by the root of the second moment. If rounding removes the square of a gradient (below 1e-23 in float32,
    below 2e-4 in float16), Adam divides by eps alone, and the update is as large as lr x gradient / eps. Single
    parameters may have gradients that are mathematically 0, so the rule counts the elements of all parameters together.
    If the lost squares are within the range of the dtype, the message says that rounding did not remove them.
    """

    name = "zero-second-moment"
    finds = "Adam's second moments are 0 where gradients are not."
    needs = "second moments, as Adam keeps them"
    limits: ClassVar[Mapping[str, Limit]] = {
        "share": Limit(default=0.1, message="largest share of all elements with a first moment"),
        "least_steps": Limit(default=5, message="steps in a row in which it must be so"),
    }

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return "exp_avg_sq" in contents.slots

    def _wrong(self, table: StepTable) -> Found | None:
        moving = lost = most = 0
        worst: MergedSite | None = None
        rounds = True
        for one in adam_states(table):
            resting = int(one.first.summary["zero"])
            degenerate = int(one.second.summary["zero"]) + int(one.second.summary["subnormal"])
            own = max(0, degenerate - resting)
            moving += one.count - resting
            lost += own
            if own > most:
                most, worst, rounds = own, one.second, not _is_in_range(one, whole=own >= one.count - resting)
        if not moving:
            return None
        numbers = {"share": lost / moving, "rounded": rounds}
        return {"": (worst, numbers)} if worst and lost > self.limit("share") * moving else {}

    def _message(self, row: Repeated) -> str:
        why = (
            "Adam then divides by eps alone. Keep its state in float32, or scale the loss up."
            if row.numbers["rounded"]
            else f"Rounding does not explain that: the squares are within the range of {row.site.dtype}. Is the state "
            "never written, or overwritten with zeros?"
        )
        return (
            f"{row.numbers['share']:.0%} of all elements have a gradient whose square is lost: their second moment is "
            f"0 or subnormal in {row.site.dtype}, most of them in {row.site.key.path}, in {row.num_steps} steps. {why}"
        )


_SMALLEST_WEIGHT = 1e-4
"""Smallest share that the latest gradients have in a second moment: a tenth of 1 - beta for the usual 0.999."""


def _is_in_range(state: AdamState, *, whole: bool) -> bool:
    """True if the dtype of the second moment can hold the square of the smallest first moment.

    Where all second moments are lost (`whole`), the square of the largest is enough.
    """
    first = state.first.summary
    size = float(largest(first)) if whole else float(first["smallest"])
    return _SMALLEST_WEIGHT * size * size > SMALLEST_NORMAL.get(state.second.dtype, math.inf)


class EpsIsSmall(RepeatedRule):
    """In most of a model, the largest root of a parameter's second moment is below eps.

    Then Adam is gradient descent with the learning rate lr / eps. Biases before a normalization, and key biases of
    attention, have gradients that are 0 except for rounding. If a model fits its data perfectly, all its gradients are
    like this. So the rule requires more than half of all elements, and only warns.
    """

    name = "eps-dominates"
    finds = "Adam's eps is larger than the roots of most second moments."
    needs = "second moments, as Adam keeps them"
    warns = True
    limits: ClassVar[Mapping[str, Limit]] = {
        "share": Limit(default=0.5, message="largest share of all elements that such parameters may have"),
        "least_steps": Limit(default=10, message="steps in a row in which it must be so"),
    }

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return "exp_avg_sq" in contents.slots

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
