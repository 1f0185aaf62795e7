"""Parameters that get gradients and never change: frozen by mistake, or held by no optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from traindiff.findings import Finding
from traindiff.merging.step_table import Entry, Key
from traindiff.observation import MASTER, SKIPPED
from traindiff.rounding import UNIT_ROUNDOFF
from traindiff.rules.rule import Rule, RunFacts
from traindiff.summary import nonfinite_count, norm

LEAST_STEPS = 2
"""Steps that must have passed over a parameter before it is said that it never changes."""


@dataclass(slots=True)
class _Resting:
    """A parameter that has not changed so far.

    Attributes:
        entry: As it was first seen.
        steps: Steps that should have changed it.
        first: The first of them.
    """

    entry: Entry
    steps: int = 0
    first: int = 0


class ParametersMove(Rule):
    """Parameters whose bits never change, although steps pass that should change them.

    A step should, where the parameter's gradient is finite and one step of gradient descent on it would be more than
    rounding: `lr * ||gradient|| > 2 u ||parameter||`, with the largest learning rate that the step has. So gradients
    that are mathematically zero, warm-up from a learning rate of 0, and steps that a loss scaler skipped do not count,
    and neither do short dtypes that round small updates away, of which `UpdatesFollowSettings` knows more.
    """

    tells_runs_apart = False  # a comparison sees the other run's update

    def __init__(self, facts: RunFacts, *, strictness: float = 1.0) -> None:
        super().__init__(facts, strictness=strictness)
        self._resting: dict[str, _Resting] = {}
        self._moved: set[str] = set()

    def step(self, table: Mapping[Key, Entry], *, step: int) -> tuple[Finding, ...]:
        """Takes note of the step; what never changes is known at the end."""
        rate = _largest_rate(table)
        skipped = any(key.phase == "optimizer" and key.slot == SKIPPED for key in table)
        for stage in ("before", ""):
            for path, entry in _parameters(table, stage):
                self._see(path, entry)
                should_move = stage == "" and not skipped and _should_move(table, entry, rate)
                if should_move and path in self._resting:
                    resting = self._resting[path]
                    resting.first = resting.first if resting.steps else step
                    resting.steps += 1
        return ()

    def end(self) -> Iterator[Finding]:
        """See the class."""
        for path, resting in self._resting.items():
            if resting.steps < LEAST_STEPS:
                continue
            held = self.facts.held_by_optimizers
            says = f"{path} gets gradients that should move it in {resting.steps} steps, and never changes"
            if held and path not in held:
                says += ": no recorded optimizer holds it. If that is meant, set requires_grad=False."
            else:
                says += ", although an optimizer holds it. Does the optimizer step on a copy?" if held else "."
            yield Finding(
                step=resting.first, phase="param", path=path, slot="value", order=resting.entry.order,
                kind="never-updated", says=says, evidence={"steps_without_change": resting.steps},
            )  # fmt: skip

    def _see(self, path: str, entry: Entry) -> None:
        if path in self._moved:
            return
        first = self._resting.get(path)
        if first is None:
            self._resting[path] = _Resting(entry.without_parts())
        elif first.entry.summary["fingerprint"] != entry.summary["fingerprint"]:
            self._moved.add(path)
            del self._resting[path]


def _parameters(table: Mapping[Key, Entry], stage: str) -> Iterator[tuple[str, Entry]]:
    """By path, what an optimizer steps on: the parameter, or the master weights that it has of it."""
    for key, entry in table.items():
        if key.phase != "param" or key.stage != stage or key.slot != "value" or key.call or key.micro_step:
            continue
        master = table.get(key._replace(slot=MASTER))
        known = master or entry
        if known.exact and not known.unobserved and not known.apart:
            yield key.path, known


def _should_move(table: Mapping[Key, Entry], parameter: Entry, rate: float | None) -> bool:
    gradient = table.get(Key("grad", "", parameter.key.path, "grad", 0, 0))
    if rate is None or gradient is None or gradient.unobserved or nonfinite_count(gradient.summary):
        return False
    u = UNIT_ROUNDOFF.get(parameter.dtype, math.inf)
    return rate * float(norm(gradient.summary)) > 2.0 * u * float(norm(parameter.summary))


def _largest_rate(table: Mapping[Key, Entry]) -> float | None:
    """The largest learning rate of any group; None where none was recorded."""
    rates = [float(entry.summary["sum"]) for key, entry in table.items() if key.group and key.slot == "lr"]
    return max(rates, default=None)
