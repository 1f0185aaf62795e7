"""Ranks that train apart for some steps, and become equal again when the training averages their parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.indexed import sites
from traindiff.analyse.merge.placed_parts import ranks_of
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable, ranks_in
from traindiff.analyse.rules.rule import RunFacts
from traindiff.core.observation import BEFORE, BY_HAND, EDITED
from traindiff.core.summary import norm_of

_GROWS = 2.0
"""How much longer than all before the last stretch of a run may be: some trainings average at growing distances."""

_MOST_STEPS = 1000
"""Steps for which a finding waits for the first time that ranks become equal again."""


@dataclass(slots=True, kw_only=True)
class _Apart:
    """A parameter that ranks hold in different copies.

    Attributes:
        since: The step that left it so; -1 if all ranks hold the same.
        latest: The latest step of which something was found.
        findings: What was found since then, about the parameter, its gradient and the optimizer's state.
        met: How often it became the same on all ranks.
        first: The first step that found it so.
        longest: The most steps from one such time to the next.
        told: It was apart for so long that the findings were given.
    """

    since: int = -1
    latest: int = -1
    findings: list[Finding] = field(default_factory=list)
    met: int = 0
    first: int = -1
    longest: int = 0
    told: bool = False

    def meet(self, step: int) -> None:
        """Note that a step found it the same on all ranks."""
        self.first = step if self.first < 0 else self.first
        self.longest = max(self.longest, step - self.since)
        self.met += 1
        self.since = -1
        self.findings.clear()


def _is_on_all(entry: MergedSite, table: StepTable) -> bool:
    return ranks_of(entry.parts) == ranks_in(table)


class RanksApart:
    """Findings about copies that differ, until it is known whether the training makes them equal again.

    Nothing waits where something is known to reduce gradients in every step.

    Args:
        facts: About the run.
    """

    def __init__(self, facts: RunFacts) -> None:
        self._by_path: dict[str, _Apart] = {}
        self._reduced = False  # gradients are the same on all ranks, or were
        self.learn(facts)

    def learn(self, facts: RunFacts) -> None:
        """Go on with facts that have become known since."""
        self._may_average = facts.engine == BY_HAND or facts.has_hook
        self._parameters = facts.parameters

    def look(self, table: StepTable, *, step: int) -> None:
        """Note the parameters that a step finds to be the same on all ranks, though its optimizer left them apart.

        And whether ranks reduce gradients: then none is apart on purpose.
        """
        if self._may_average and not self._reduced:
            self._reduced = any(
                not (entry.apart or entry.unobserved) and _is_on_all(entry, table)
                and len(ranks_of(entry.parts)) > 1 and norm_of(entry.summary) > 0.0
                for _, entry in sites(table, "grad", stage="")
            )  # fmt: skip
        for path, one in self._by_path.items():
            if one.since < 0 or one.told:
                continue
            for stage in (BEFORE, EDITED, ""):  # a step may leave a parameter as it was
                entry = table.get(SiteKey("param", stage, path, "value"))
                if entry is not None and not (entry.apart or entry.unobserved) and _is_on_all(entry, table):
                    one.meet(step)
                    break

    def hold(self, finding: Finding) -> Iterator[Finding]:
        """Keep a finding about a parameter; yields it, and those before, if they waited for too long, or need not."""
        if not self._may_average or self._reduced or finding.path not in self._parameters:
            yield finding
            return
        one = self._by_path.setdefault(finding.path, _Apart())
        if one.told:
            yield finding
            return
        one.since, one.latest = finding.step if one.since < 0 else one.since, finding.step
        one.findings.append(finding)
        if one.latest - one.since >= max(_MOST_STEPS, 2 * one.longest):
            one.told = True
            yield from one.findings
            one.findings.clear()

    def left(self) -> Iterator[Finding]:
        """The findings about parameters that stayed apart for longer than they did before, to the end of the run."""
        for one in self._by_path.values():
            if self._stays_apart(one):
                yield from one.findings

    def _stays_apart(self, one: _Apart) -> bool:
        return one.since >= 0 and (self._reduced or one.latest + 1 - one.since > _GROWS * one.longest)

    def notes(self) -> Iterator[str]:
        """That ranks train apart, and become equal again."""
        met = [one for one in self._by_path.values() if one.met and not one.told and not self._stays_apart(one)]
        if met:
            most = max(met, key=lambda one: one.met)
            what = "1 parameter" if len(met) == 1 else f"{len(met)} parameters"
            times = "once" if most.met == 1 else f"{most.met} times"
            yield (
                f"Ranks train apart, and the training makes {what} equal on all ranks again, {times}, first before "
                f"step {most.first} (local SGD). Between these times, their copies were not compared."
            )
