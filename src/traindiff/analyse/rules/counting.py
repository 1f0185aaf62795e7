"""What an optimizer should go on to do: count its steps, and hold the parameters that it held."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from traindiff.analyse.findings import Finding, more_text
from traindiff.analyse.merge.indexed import sites
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable
from traindiff.analyse.rules.optimizers import may_be_left_out
from traindiff.analyse.rules.rule import Contents, Limit, Rule
from traindiff.analyse.rules.unused_parameters import parameters_of
from traindiff.core.observation import TAKEN_OUT
from traindiff.core.summary import UNIT_ROUNDOFF, number

COUNT = "step"


@dataclass(slots=True, kw_only=True)
class _Counted:
    """The count of steps that an optimizer keeps for a parameter.

    Attributes:
        entry: The count as the latest step left it.
        value: Its number.
        bits: Fingerprint of the parameter after that step.
        moved: Steps in a row that moved the parameter and left the count as it was.
        first: The first of these.
        longest: The most such steps before it counted again.
    """

    entry: MergedSite
    value: float
    bits: int
    moved: int = 0
    first: int = 0
    longest: int = 0


class StepsAreCounted(Rule):
    """An optimizer moves a parameter in each step, and its own count of steps for it stays the same until the end.

    Adam divides by `1 - beta ** step`. If the count stands still, the correction of its moments is that of another step
    from then on. The count is also lost if it is held in a short dtype: in bfloat16, 256 + 1 is 256. Steps that leave
    the parameter as it was do not count, nor do those that a loss scaler leaves out. An optimizer that counts every
    k-th call rests in between. So the rest must be more than twice as long as any earlier one.
    """

    name = "step-not-counted"
    finds = "The optimizer moves a parameter, and its own count of steps stands still."
    needs = "an optimizer that counts its steps"
    limits: ClassVar[Mapping[str, Limit]] = {
        "least_steps": Limit(default=5, message="steps at the end of the run that move the parameter and do not count"),
    }

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return COUNT in contents.slots

    def begin(self) -> None:
        """Nothing was seen so far."""
        self._counts: dict[str, _Counted] = {}

    def step(self, table: StepTable, *, step: int) -> None:
        """Note a step; the findings come at the end."""
        judged = not may_be_left_out(table)
        for path, parameter in parameters_of(table, stage=""):
            entry = table.get(SiteKey("optimizer", "", path, COUNT))
            if entry is None or entry.unobserved or int(entry.summary["count"]) != 1:
                continue
            value, bits = number(entry.summary), int(parameter.summary["fingerprint"])
            before = self._counts.get(path)
            if before is None:
                self._counts[path] = _Counted(entry=entry.without_parts(), value=value, bits=bits)
                continue
            if value != before.value:
                before.longest, before.moved = max(before.longest, before.moved), 0
                before.entry, before.value = entry.without_parts(), value
            elif judged and bits != before.bits:
                before.first = before.first if before.moved else step
                before.moved += 1
            before.bits = bits

    def end(self) -> Iterator[Finding]:
        """Counts that stand still, those of one step together."""
        found: dict[tuple[int, float], list[str]] = {}
        for path, one in self._counts.items():
            if one.moved >= max(self.limit("least_steps"), 2 * one.longest + 1):
                found.setdefault((one.first, one.value), []).append(path)
        for (first, value), paths in found.items():
            one = self._counts[paths[0]]
            full = value * UNIT_ROUNDOFF.get(one.entry.dtype, 0.0) == 1.0
            why = (
                f"The count is in {one.entry.dtype}, in which {value:g} + 1 is {value:g}: keep it in float32."
                if full
                else "Look for a count that is written from elsewhere, or a state that was loaded under a wrong name."
            )
            message = (
                f"{_named(paths)} {'moves' if len(paths) == 1 else 'move'} in {one.moved} steps, from step {first} on, "
                f"and the optimizer's own count of steps stays at {value:g}. Whatever depends on the count, as Adam's "
                f"bias correction does, is that of another step. {why}"
            )
            yield self.finding(
                one.entry, message, step=first, num_steps=one.moved, state_step=value, num_parameters=len(paths)
            )


@dataclass(slots=True, kw_only=True)
class _Out:
    entry: MergedSite
    first: int
    num_steps: int = 0


class OptimizersKeepParameters(Rule):
    """An optimizer held a parameter, and then no longer holds it, although it requires a gradient, and has one.

    Something took it out of `param_groups` in mid-run, and no other recorded optimizer took it over. To freeze
    parameters like this is a choice, so the rule only warns. It does not judge parameters with requires_grad=False,
    parameters whose optimizer was replaced by a new one, or those that come back before the run ends.
    """

    name = "taken-out"
    finds = "A parameter was taken out of its optimizer in mid-run, and still has gradients."
    warns = True
    limits: ClassVar[Mapping[str, Limit]] = {
        "least_steps": Limit(default=5, message="steps at the end of the run in which no optimizer holds it"),
    }

    def begin(self) -> None:
        """Nothing was seen so far."""
        self._out: dict[str, _Out] = {}

    def step(self, table: StepTable, *, step: int) -> None:
        """Note a step; the findings come at the end."""
        for key, entry in sites(table, "grad", stage=""):
            if key.slot != "grad":
                continue
            if entry.unobserved == TAKEN_OUT:
                one = self._out.setdefault(key.path, _Out(entry=entry.without_parts(), first=step))
                one.num_steps += 1
            elif key.path in self._out:
                del self._out[key.path]

    def end(self) -> Iterator[Finding]:
        """Parameters that were taken out, those of one step together."""
        found: dict[int, list[str]] = {}
        for path, one in self._out.items():
            if one.num_steps >= self.limit("least_steps") and path not in self.facts.held_in:
                found.setdefault(one.first, []).append(path)
        for first, paths in found.items():
            one = self._out[paths[0]]
            was, it, has = ("was", "it", "it has") if len(paths) == 1 else ("were", "them", "they have")
            message = (
                f"{_named(paths)} {was} taken out of the parameter groups before step {first}: the optimizer no longer "
                f"moves {it}, although {has} gradients. If that is meant, set requires_grad=False. Else look at what "
                "changes param_groups."
            )
            yield self.finding(one.entry, message, step=first, num_steps=one.num_steps, num_parameters=len(paths))


def _named(paths: list[str]) -> str:
    """The first of some parameters, and how many more there are."""
    return paths[0] + more_text(len(paths) - 1, "parameter")
