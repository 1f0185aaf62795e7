"""A run judged by several rules, and the answer of each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Literal

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.site import StepTable
from traindiff.analyse.products import ProductCheck
from traindiff.analyse.rules.rule import LEAST_STEPS, Contents, Rule, RunFacts

Answer = Literal["broken", "warned", "ignored", "nothing found", "not applicable"]
"""What a rule answers; the worst first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedRule:
    """A rule that a run was held against, and its answer.

    Attributes:
        name: Its name.
        finds: A sentence about what it finds.
        result: `broken`, `warned`, `ignored` (all that it found is at sites that the user ignores), `nothing found`, or
            `not applicable` (the run has nothing that it judges).
        unknown: Why it could not judge a part of the run, or all of it; empty if nothing is known to be missing.
    """

    name: str
    finds: str
    result: Answer
    unknown: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The rule in the schema of `--json`."""
        return {"name": self.name, "result": self.result, "unknown": list(self.unknown)}


class RunJudge:
    """Judges a run by several rules, step by step.

    Args:
        rules: The rules.
        facts: Facts about the run.
        strictness: Divides the limits of the rules: 2 finds faults half as large.
        limits: Set by the user, by the rule's name and the limit's.

    Attributes:
        unknown: Sentences about what could not be judged so far, in order.
    """

    def __init__(
        self,
        rules: Iterable[type[Rule]],
        facts: RunFacts,
        *,
        strictness: float = 1.0,
        limits: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        chosen = limits or {}
        self._rules = [rule(facts, strictness=strictness, limits=chosen.get(rule.name)) for rule in rules]
        self._found: set[tuple[str, str]] = set()
        self.unknown: dict[str, None] = {}
        self._unknown_to: dict[str, dict[str, None]] = {}
        self._facts = facts
        self._waiting = list(self._rules)
        self._num_steps = 0

    def learn(self, facts: RunFacts) -> None:
        """Judge later steps with facts that have become known since."""
        self._facts = facts
        for rule in self._rules:
            rule.learn(facts)

    def step(
        self, table: StepTable, *, step: int, finished: bool = True, products: Sequence[ProductCheck] = ()
    ) -> list[Finding]:
        """Findings of a step, in the order of execution; fewer rules judge one without a call of the optimizer."""
        rules = [rule for rule in self._rules if finished or rule.judges_unfinished]
        found = [finding for rule in rules for finding in rule.step(table, step=step) or ()]
        found += [finding for rule in rules for finding in rule.products(products, step=step)]
        self._found.update((finding.kind, finding.path) for finding in found)
        return sorted(found, key=lambda finding: finding.order)

    def is_warning(self, finding: Finding) -> bool:
        """True if a finding is a warning of its rule."""
        return any(rule.is_warning(finding) for rule in self._rules if finding.kind in rule.kinds)

    def note_unknown(self, table: StepTable) -> None:
        """Remember what the rules cannot judge in a step."""
        for rule in self._rules:
            said = dict.fromkeys(rule.unknown(table))
            self.unknown.update(said)
            if said:
                self._unknown_to.setdefault(rule.name, {}).update(said)

    def note_contents(self, table: StepTable, products: Sequence[ProductCheck], *, finished: bool = True) -> None:
        """Remember which rules have something to judge in a step."""
        contents = Contents(table, self._facts, products)
        self._waiting = [rule for rule in self._waiting if not rule.applies(contents)]
        self._num_steps += finished

    def _nothing_to_judge(self, rule: Rule) -> str:
        """Why a rule judges nothing of the run, in a sentence; empty if it judges something."""
        if rule in self._waiting:
            return f"It needs {rule.needs}"
        if why := rule.why_unjudged():
            return why
        least = rule.limit(LEAST_STEPS) if LEAST_STEPS in rule.limits else 0.0
        return f"It needs {least:g} steps; the run has {self._num_steps}" if self._num_steps < least else ""

    def end(self) -> list[Finding]:
        """Findings of the whole run that no step has shown."""
        found = [finding for rule in self._rules for finding in rule.end()]
        fresh = [finding for finding in found if (finding.kind, finding.path) not in self._found]
        return sorted(fresh, key=lambda finding: (finding.step, finding.order))

    def asked(self, found: Iterable[Finding], ignored: Iterable[Finding] = ()) -> tuple[AskedRule, ...]:
        """All rules with their answers.

        Args:
            found: All findings that count.
            ignored: All others.
        """
        counting, left_out = [*found], {finding.kind for finding in ignored}
        return tuple(self._answer(rule, counting, left_out) for rule in self._rules)

    def _answer(self, rule: Rule, found: Sequence[Finding], left_out: Set[str]) -> AskedRule:
        result: Answer = "nothing found"
        unknown = tuple(self._unknown_to.get(rule.name, ()))
        if own := [finding for finding in found if finding.kind in rule.kinds]:
            result = "warned" if all(map(rule.is_warning, own)) else "broken"
        elif not left_out.isdisjoint(rule.kinds):
            result = "ignored"
        elif why := self._nothing_to_judge(rule):
            result, unknown = "not applicable", (why,)
        return AskedRule(name=rule.name, finds=rule.finds, result=result, unknown=unknown)

    def notes(self) -> list[str]:
        """Notes of all rules on the finished run."""
        return [note for rule in self._rules for note in rule.notes()]
