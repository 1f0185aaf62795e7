"""Parameters that moved and then stand still, while their optimizer goes on being called."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.indexed import sites
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable
from traindiff.analyse.rules.optimizers import largest_rate, learning_rates, may_be_left_out, optimizer_of
from traindiff.analyse.rules.rule import Limit, Rule
from traindiff.analyse.rules.unused_parameters import parameters_of, should_move
from traindiff.core.summary import norm_of, number

_SETTLES = frozenset({"LBFGS", "Rprop"})
"""Optimizers that rightly stop moving parameters that still have gradients."""


@dataclass(slots=True, kw_only=True)
class _Moving:
    """What is known of a parameter that has a gradient.

    Attributes:
        entry: As the latest step left it.
        bits: Fingerprints of the parameter and of the optimizer's state for it.
        moved_in: The latest step that was seen to change it; -1 before that.
        resting: Steps in a row that changed nothing.
        first: The first of these.
        longest: The most such steps before it moved again.
        count: The optimizer's own count of steps, if it is recorded.
    """

    entry: MergedSite
    bits: tuple[int, ...]
    moved_in: int = -1
    resting: int = 0
    first: int = 0
    longest: int = 0
    count: float | None = None


class ParametersKeepMoving(Rule):
    """A parameter moved, and then neither it nor the optimizer's state for it changes until the end of the run.

    Only steps count that should change something: the parameter has a finite gradient other than 0, its learning rate
    is not 0, and no loss scaler leaves the step out. An optimizer that counts its steps, as Adam does, changes this
    count in each such step. For others, a step of gradient descent must change more than rounding could
    (`never-updated`). Optimizers that add up several calls rest between them. So the rest must be more than twice as
    long as any earlier one. LBFGS and Rprop stop by themselves, and are not judged. If a training freezes a parameter,
    its gradient is None, or its learning rate is 0.
    """

    name = "stopped"
    finds = "A parameter stops moving in the middle of the run, although it has gradients."
    limits: ClassVar[Mapping[str, Limit]] = {
        "least_steps": Limit(default=5, message="steps at the end of the run that change nothing"),
    }

    def begin(self) -> None:
        """Nothing was seen so far."""
        self._seen: dict[str, _Moving] = {}
        self._optimizers: dict[str, str] = {}

    def step(self, table: StepTable, *, step: int) -> None:
        """Note a step; the findings come at the end."""
        rates = learning_rates(table)
        judged = bool(rates) and not may_be_left_out(table)
        of, states = optimizer_of(table), _states(table)
        for path, entry in parameters_of(table, stage=""):
            if path not in self.facts.held_in:
                continue
            own = states.get(path, [])
            bits = tuple(int(one.summary["fingerprint"]) for one in (entry, *own))
            before = self._seen.get(path)
            if before is None or len(before.bits) != len(bits):
                moved_in = -1 if before is None else step
                self._seen[path] = _Moving(entry=entry.without_parts(), bits=bits, moved_in=moved_in)
                continue
            self._optimizers[path] = of
            if before.bits != bits:
                before.longest = max(before.longest, before.resting)
                before.moved_in, before.resting, before.bits = step, 0, bits
                before.entry = entry.without_parts()
            elif judged and self._should_change(table, entry, own, rates):
                before.first = before.first if before.resting else step
                before.resting += 1
                before.count = _count(own)

    def _should_change(
        self, table: StepTable, parameter: MergedSite, states: list[MergedSite], rates: Mapping[str, float]
    ) -> bool:
        """True if a step should change a parameter, or the optimizer's count of steps for it."""
        path = parameter.key.path
        gradient = table.get(SiteKey("grad", "", path, "grad"))
        if gradient is None or gradient.unobserved or not norm_of(gradient.summary):
            return False
        if not all(rates.get(group, 0.0) for group in self.facts.held_in[path]):
            return False
        return _count(states) is not None or should_move(table, parameter, largest_rate(path, rates, self.facts))

    def end(self) -> Iterator[Finding]:
        """Findings of the whole run."""
        for path, one in self._seen.items():
            least = max(self.limit("least_steps"), 2 * one.longest + 1)
            if one.moved_in < 0 or one.resting < least:
                continue
            if self.facts.optimizers.get(self._optimizers.get(path, "")) in _SETTLES:
                continue
            count = "" if one.count is None else f" The optimizer's own count of its steps stays at {one.count:g}."
            message = (
                f"{path} last moved in step {one.moved_in}, and then stands still: {one.resting} steps with gradients, "
                f"from step {one.first} on, change none of its bits.{count} Look at what was done between the two: a "
                "replaced model or optimizer, a compiled step that was kept, or copies that are trained in its place."
            )
            yield self.finding(one.entry, message, step=one.first, num_steps=one.resting, state_step=one.count)


def _states(table: StepTable) -> dict[str, list[MergedSite]]:
    """The optimizer's state after a step, by path of the parameter; only what is known exactly."""
    found: dict[str, list[MergedSite]] = {}
    for key, entry in sites(table, "optimizer", stage=""):
        if not key.group and entry.exact and not entry.unobserved:
            found.setdefault(key.path, []).append(entry)
    return found


def _count(states: list[MergedSite]) -> float | None:
    return next((number(one.summary) for one in states if one.key.slot == "step"), None)
