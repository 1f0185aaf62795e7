"""Parameters without gradients, or that never change: detached, frozen, or held by no optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.indexed import sites
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable
from traindiff.analyse.rules.optimizers import (
    largest_rate,
    learning_rates,
    may_be_left_out,
    moves_parameters,
    optimizer_of,
)
from traindiff.analyse.rules.rule import Found, Limit, Repeated, RepeatedRule, Rule, RunFacts
from traindiff.core.observation import BEFORE, EDITED, MASTER, NO_GRADIENT, REPLACED, TAKEN_OUT
from traindiff.core.site import enclosing
from traindiff.core.summary import UNIT_ROUNDOFF, norm_of


class OptimizersHaveGradients(RepeatedRule):
    """None of the parameters that an optimizer holds has a gradient, for several steps in a row: nothing moves.

    The cause is `zero_grad` between `backward` and `step`, a loss that does not depend on the optimizer's parameters,
    or parameters that were all frozen (`requires_grad=False`) until the end of the run. A gradient of zeros counts as a
    gradient, because the loss of every sample may already be minimal.
    """

    name = "idle-optimizer"
    finds = "An optimizer steps, and none of its parameters has a gradient, step after step."
    limits: ClassVar[Mapping[str, Limit]] = {
        "least_steps": Limit(default=10, message="steps in a row in which it must be so"),
    }

    def _wrong(self, table: StepTable) -> Found | None:
        gradients = [entry for _, entry in sites(table, "grad", stage="")]
        of = self._series(table)
        if not gradients:
            held = [path for path, groups in self.facts.held_in.items() if any(_is_group_of(one, of) for one in groups)]
            rate = table.get(SiteKey("optimizer", "", f"{of}.groups[0]", "lr"))
            if rate is None or not held or not self.facts.trainable or self.facts.trainable.intersection(held):
                return None
            return {of: (rate, {"num_parameters": len(held), "frozen": True})}
        idle = all(entry.unobserved.startswith(NO_GRADIENT) for entry in gradients)
        return {of: (gradients[0], {"num_parameters": len(gradients), "frozen": False})} if idle else {}

    def end(self) -> Iterator[Finding]:
        """Optimizers that idle; frozen ones only if nothing thaws their parameters until the end of the run."""
        rests = {row.key for row in self._running.values()}
        for row in [row for row in self._kept if self._kept[row].numbers["frozen"] and row[1] not in rests]:
            del self._kept[row]
        return super().end()

    def _series(self, table: StepTable) -> str:
        return optimizer_of(table)

    def _message(self, row: Repeated) -> str:
        name, count = row.key or "The optimizer", row.numbers["num_parameters"]
        steps = f"{name} steps {row.num_steps} times in a row, from step {row.first} on, and none of its {count}"
        if row.numbers["frozen"]:
            return (
                f"{steps} parameters requires a gradient (requires_grad=False): it moves nothing. Were they frozen "
                "after the optimizer was made?"
            )
        return (
            f"{steps} parameters has a gradient: nothing is learned. Look for zero_grad() between backward() and "
            "step(), and whether the loss depends on these parameters."
        )


def _is_group_of(group: str, optimizer: str) -> bool:
    return group.rpartition(".groups[")[0] == optimizer


@dataclass(slots=True, kw_only=True)
class _Without:
    """Steps in a row in which a parameter has no gradient, until now.

    Attributes:
        entry: Its gradient in the first of them, of which nothing may be known.
        first: This step.
        num_none: How many of them have no gradient.
        num_zero: How many have a gradient that is 0 in every element.
    """

    entry: MergedSite
    first: int
    num_none: int = 0
    num_zero: int = 0

    @property
    def num_steps(self) -> int:
        """The number of these steps."""
        return self.num_none + self.num_zero

    @property
    def what(self) -> str:
        """What its gradient is, in words that follow its path."""
        if not self.num_zero:
            return f"is None in all of {self.num_steps} steps"
        others = "" if self.num_zero == self.num_steps else ", and None in the others"
        return f"is 0 in every element in {self.num_zero} of {self.num_steps} steps{others}"


_REPLACED = (
    "The optimizer holds it, and the recorded model does not: was a module replaced, or the model copied, after the "
    "optimizer was made?"
)
_NEVER = (
    "Look for detach(), no_grad(), zero_grad() before the step, and results that the loss does not use; if it is "
    "meant, requires_grad=False says so."
)
_ENDED = (
    "Did a phase of the training end there, or was the parameter frozen? If not, look for detach(), no_grad(), "
    "zero_grad() before the step, and results that the loss does not use any more."
)


@dataclass(slots=True, kw_only=True)
class _Given:
    """A parameter that had a gradient.

    Attributes:
        last: The latest step in which it had one.
        num_steps: How many such steps there were.
        longest: The most steps in a row without one since the first of them, and before the latest.
    """

    last: int
    num_steps: int = 0
    longest: int = 0


class GradientsArrive(Rule):
    """In every step in which something could move, the gradient of a parameter is None, or 0 in every element.

    Often this is intended (a pooler that a task does not use, an expert that is never chosen), so the rule only warns.
    A gradient of one number whose terms are there and cancel is a gradient.
    Otherwise something was detached, computed under `no_grad`, or multiplied by 0.

    It also warns if a parameter had gradients in several steps, and then has none until the end of the run, although
    other parameters have. Some trainings use a parameter now and then, so this rest must be more than twice as long as
    any earlier one. A parameter whose requires_grad is False, and that has no gradient, is not warned of.
    """

    name = "no-gradient"
    finds = "A parameter that an optimizer holds gets no gradient in any step, or from some step on."
    warns = True
    limits: ClassVar[Mapping[str, Limit]] = {
        "least_steps": Limit(default=5, message="steps that must have passed; heads of zeros give gradients after one"),
    }

    def begin(self) -> None:
        """Start with an empty state."""
        self._without: dict[str, _Without] = {}
        self._given: dict[str, _Given] = {}

    def step(self, table: StepTable, *, step: int) -> None:
        """Note a step; the findings come at the end."""
        moves, some_is_given = moves_parameters(table), False
        without: list[tuple[MergedSite, bool]] = []
        for key, entry in sites(table, "grad", stage=""):
            none = entry.unobserved.startswith(NO_GRADIENT) and entry.unobserved != TAKEN_OUT
            count = 0 if entry.unobserved else int(entry.summary["count"])
            if none or (count and int(entry.summary["zero"]) == count and not _cancels(table, entry)):
                without.append((entry, none))
            else:  # unknown gradients and empty ones count as seen
                some_is_given |= bool(count)
                self._note_given(key.path, step)
        for entry, none in without if moves else ():
            path = entry.key.path
            if path in self._given and not some_is_given:
                continue  # a loss that is minimal gives no gradient to any
            one = self._without.setdefault(path, _Without(entry=entry.without_parts(), first=step))
            one.num_none += none
            one.num_zero += not none

    def _note_given(self, path: str, step: int) -> None:
        before = self._without.pop(path, None)
        one = self._given.get(path)
        if one is None:
            one = self._given[path] = _Given(last=step)
        elif before is not None:
            one.longest = max(one.longest, before.num_steps)
        one.last = step
        one.num_steps += 1

    def end(self) -> Iterator[Finding]:
        """Findings of the whole run."""
        least = self.limit("least_steps")
        for path, one in self._without.items():
            given = self._given.get(path)
            if given is not None and (given.num_steps < least or one.num_steps <= 2 * given.longest):
                continue
            if one.num_steps < least:
                continue
            is_replaced = path.partition(".groups[")[0] in self.facts.optimizers and path not in self.facts.parameters
            hint = _ENDED if given is not None else _REPLACED if is_replaced else _NEVER
            message = (
                f"{path} gets no gradient: it {one.what}."
                if given is None
                else f"{path} gets no gradient from step {one.first} on: it {one.what}, to the end of the run. Its "
                f"latest gradient is that of step {given.last}."
            )
            yield self.finding(
                one.entry, f"{message} {hint}", step=one.first, none=one.num_none, zero=one.num_zero,
                num_steps=one.num_steps,
            )  # fmt: skip


def _cancels(table: StepTable, gradient: MergedSite) -> bool:
    """True if what adds up to a gradient of one number is there. It may cancel: the last bias of a WGAN's critic.

    A penalty on gradients leaves gradients of the same output that do not belong to this sum. A step without
    gradients of outputs, such as that of a second optimizer, has that of the weight: it is a sum of the same terms.
    """
    if int(gradient.summary["count"]) != 1:
        return False  # sums by element are not recorded
    module, _, name = gradient.key.path.rpartition(".")
    terms = [entry for key, entry in sites(table, "backward", stage="") if key.path == module
             and key.slot == "output[0]" and not entry.unobserved]  # fmt: skip
    weight = table.get(gradient.key._replace(path=f"{module}.weight"))
    if name == "bias" and weight and not weight.unobserved and not any(key.phase == "backward" for key in table):
        terms.append(weight)
    return any(norm_of(one.summary) > 0.0 for one in terms)


LEAST_STEPS = 2
"""Steps that must have passed over a parameter before it is said that it never changes."""


@dataclass(slots=True, kw_only=True)
class _Resting:
    """A parameter that has not changed so far.

    Attributes:
        entry: As it was first seen.
        steps: Steps that should have changed it, and after which it was seen unchanged.
        unseen: Further such steps, after which it was not seen yet.
        first: The first of all of them.
    """

    entry: MergedSite
    steps: int = 0
    unseen: int = 0
    first: int = 0

    def pass_over(self, step: int) -> None:
        """Note a step that should change it."""
        self.first = self.first if self.steps + self.unseen else step
        self.unseen += 1

    def see(self) -> None:
        """Note that it is unchanged."""
        self.steps, self.unseen = self.steps + self.unseen, 0

    def look_back(self) -> None:
        """Note that it was unchanged before the latest step."""
        self.steps, self.unseen = self.steps + max(self.unseen - 1, 0), min(self.unseen, 1)


class ParametersMove(Rule):
    """The bits of a parameter never change, although steps pass that should change them.

    A step should change a parameter of an optimizer if all gradients are finite and a step of gradient descent would
    change the parameter by more than its rounding: `lr * min(||gradient||, sqrt(n)) > 2 u ||parameter||`, with n
    elements and the learning rate of the parameter's group. The limit sqrt(n) allows for optimizers that normalize the
    size of the gradient. So these do not count: gradients that are mathematically zero, groups with a learning rate of
    0, and steps that a loss scaler skips (a fused optimizer skips them itself, and does not say so). Short dtypes that
    round small updates away do not count either; `UpdatesFollowSettings` judges those better. If an optimizer that
    steps by code of its own moves none of its parameters, that is a warning: it may gather gradients, or warm up. If it
    moves all others by less than the rounding of a parameter (D-Adaptation and Prodigy begin with steps of a
    millionth of the learning rate), that parameter is not judged in the step.
    If a parameter requires a gradient and no optimizer holds it, each step that is not skipped should change it. If
    most parameters of a model are like this, as when only its head is trained, the rule gives a note. If others of
    the same part of the model change, the training writes to that part itself (a moving average of the weights),
    and it is not judged. Nor is a part whose outputs get no gradients, such as a teacher that is called under
    `no_grad`.
    """

    name = "never-updated"
    finds = "A parameter never changes, although steps pass that should move it, or no optimizer holds it."
    limits: ClassVar[Mapping[str, Limit]] = {
        "least_steps": Limit(default=LEAST_STEPS, message="steps that must have passed over it; one may be chance"),
    }

    def begin(self) -> None:
        """Start with an empty state."""
        self._resting: dict[str, _Resting] = {}
        self._moved: set[str] = set()
        self._replaced: set[str] = set()
        self._reached: set[str] = set()  # modules other than the root whose outputs get gradients
        self._find_unheld()

    def learn(self, facts: RunFacts) -> None:
        """`Rule.learn`."""
        super().learn(facts)
        self._find_unheld()

    def _find_unheld(self) -> None:
        self._unheld = self.facts.trainable - self.facts.held_in.keys() if self.facts.held_in else frozenset[str]()

    def step(self, table: StepTable, *, step: int) -> None:
        """Note a step; the findings come at the end."""
        rates = learning_rates(table)
        after = dict(parameters_of(table, stage=""))
        moving: set[str] = set()
        if not may_be_left_out(table):
            reach = self._reach(table, rates) if self.facts.own_steps else {}
            for path, one in after.items():
                rate = largest_rate(path, rates, self.facts)
                if should_move(table, one, rate) and (not reach or self._is_within_reach(path, one, rate, reach)):
                    moving.add(path)
            if any(rates.values()):
                moving |= self._unheld
        if self._unheld:
            self._reached.update(key.path for key, _ in sites(table, "backward") if key.path)
        for path in self._newly_replaced(table):
            self._moved.discard(path)
            self._resting.pop(path, None)
        for path, entry in (*parameters_of(table, stage=BEFORE), *parameters_of(table, stage=EDITED)):
            self._see(path, entry)
        for path in [path for path in self._resting if path in moving]:
            self._resting[path].pass_over(step)
        for path, entry in after.items():
            self._see(path, entry)

    def _reach(self, table: StepTable, rates: Mapping[str, float]) -> Mapping[str, float]:
        """How far optimizers move elements by code of their own, as a multiple of the learning rate, by name.

        It is the largest root mean square of an update. D-Adaptation and Prodigy begin at a millionth. An optimizer
        that moves nothing is left out.
        """
        found: dict[str, float] = {}
        for key, update in sites(table, "update", stage=""):
            rate, size = largest_rate(key.path, rates, self.facts), norm_of(update.summary)
            for name in self._optimizers_of(key.path) & self.facts.own_steps if rate and size else ():
                by = size / math.sqrt(int(update.summary["count"])) / rate
                found[name] = max(found.get(name, 0.0), by)
        return found

    def _is_within_reach(self, path: str, one: MergedSite, rate: float, reach: Mapping[str, float]) -> bool:
        """True if a step as long as others of a parameter's optimizers would change more than rounding could."""
        by = min((reach[name] for name in self._optimizers_of(path) & reach.keys()), default=math.inf)
        return _outweighs_rounding(rate * by * math.sqrt(int(one.summary["count"])), one)

    def _newly_replaced(self, table: StepTable) -> set[str]:
        """Parameters whose place in the model another tensor took, while the optimizer goes on with the old one."""
        found = {key.path for key, entry in sites(table, "grad", stage="") if entry.unobserved == REPLACED}
        found &= self._unheld - self._replaced
        self._replaced |= found
        return found

    def end(self) -> Iterator[Finding]:
        """Findings of the whole run."""
        if self.facts.sees_changes:  # a change would have been recorded before the step after it
            for path in sorted(self._unheld & self._resting.keys()):
                self._resting[path].look_back()
        forgotten = self._held_by_none & self._replaced if self._rest_is_meant else self._held_by_none
        moving = {name for path in self._moved for name in self._optimizers_of(path)}
        for path, resting in self._resting.items():
            stage, asked = "", ""
            if resting.steps >= self.limit("least_steps") and path in self.facts.held_in:
                message = f"{path} gets gradients that should move it in {resting.steps} steps, and never changes."
                if not self._optimizers_of(path) & moving:
                    asked = self._asked_of(path)
            elif path in forgotten:
                stage = BEFORE  # such parameters are observed before the step only
                message = self._forgotten(path)
            else:
                continue
            yield Finding(
                step=resting.first, phase="param", stage=stage, path=path, slot="value", order=resting.entry.order,
                kind=self.name, message=f"{message} {asked}".rstrip(),
                evidence={"num_steps": resting.steps} | ({"may_be_meant": True} if asked else {}),
            )  # fmt: skip

    def _forgotten(self, path: str) -> str:
        """What is said of a parameter that no optimizer holds."""
        meant = (
            "The optimizer goes on with the tensor that had its place in the model before. Was a module replaced after "
            "the optimizer was made? Give the optimizer the new parameters."
            if path in self._replaced
            else "If that is meant, set requires_grad=False."
        )
        return (
            f"No recorded optimizer holds {path}, although it requires a gradient: at least "
            f"{self._resting[path].steps} steps leave it as it was. {meant}"
        )

    def _optimizers_of(self, path: str) -> set[str]:
        return {group.partition(".groups[")[0] for group in self.facts.held_in.get(path, ())}

    def _asked_of(self, path: str) -> str:
        """What to ask of an optimizer that moves none of its parameters, by code of its own; empty for others."""
        names = self._optimizers_of(path)
        if not names <= self.facts.own_steps:
            return ""
        kinds = " and ".join(sorted({self.facts.optimizers[name] for name in names}))
        return f"{kinds} moves none of its parameters. Is that meant, as while it gathers gradients, or warms up?"

    def notes(self) -> Iterator[str]:
        """A note if no optimizer holds most of the model, as when one part is trained alone."""
        if self._rest_is_meant:
            count, first = len(self._held_by_none), min(self._held_by_none)
            yield (
                f"No recorded optimizer holds {count} parameters that require a gradient, among them {first}, and they "
                "never change. If that is meant, requires_grad=False saves computing their gradients."
            )

    @property
    def _held_by_none(self) -> set[str]:
        """Parameters that require a gradient, that no optimizer holds, and that did not change.

        Those beside others that did change are left out: the training writes to them itself (a moving average), and
        rounding may have kept one as it was.
        """
        least = self.limit("least_steps")
        written = {_model_of(path) for path in self._unheld & self._moved}
        resting = self._unheld & self._resting.keys()
        return {
            path
            for path in resting
            if self._resting[path].steps >= least and _model_of(path) not in written and self._is_reached(path)
        }

    def _is_reached(self, path: str) -> bool:
        """False if gradients of activations are known, and none is of a module that holds a parameter, but the root."""
        around = enclosing(path)[1:-1]
        return not (self._reached and around) or not self._reached.isdisjoint(around)

    @property
    def _rest_is_meant(self) -> bool:
        """True if so much of the model rests that nobody can have forgotten it."""
        held = self.facts.held_in.keys() & self.facts.trainable
        return bool(held) and len(self._held_by_none) > len(held)

    def _see(self, path: str, entry: MergedSite) -> None:
        if path in self._moved:
            return
        first = self._resting.get(path)
        if first is None:
            self._resting[path] = _Resting(entry=entry.without_parts())
        elif first.entry.summary["fingerprint"] != entry.summary["fingerprint"]:
            self._moved.add(path)
            del self._resting[path]
        else:
            first.see()


def _model_of(path: str) -> str:
    """The outermost module that holds a parameter, of those inside the root; the path itself if the root holds it."""
    return path.partition(".")[0]


def parameters_of(table: StepTable, *, stage: str) -> Iterator[tuple[str, MergedSite]]:
    """By path: the tensor that an optimizer updates, which is the parameter or its master weights."""
    for key, entry in sites(table, "param", stage=stage):
        if key.slot != "value" or key.call or key.micro_step:
            continue
        master = table.get(key._replace(slot=MASTER))
        known = master or entry
        if known.exact and not known.unobserved and not known.apart:
            yield key.path, known


def should_move(table: StepTable, parameter: MergedSite, rate: float) -> bool:
    """True if a step would change more of a parameter than rounding could."""
    gradient = table.get(SiteKey("grad", "", parameter.key.path, "grad"))
    if gradient is None or gradient.unobserved:
        return False
    size = min(norm_of(gradient.summary), math.sqrt(int(gradient.summary["count"])))
    return _outweighs_rounding(rate * size, parameter)


def _outweighs_rounding(step: float, parameter: MergedSite) -> bool:
    """True if a step whose L2 norm is this changes more of a parameter than rounding could."""
    u = UNIT_ROUNDOFF.get(parameter.dtype, math.inf)
    return step > 2.0 * u * norm_of(parameter.summary)
