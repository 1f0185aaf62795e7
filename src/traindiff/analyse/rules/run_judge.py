"""One run held against all rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.step_table import Entry, Key
from traindiff.analyse.rules.rule import Rule, RunFacts


class RunJudge:
    """Judges a run by itself, step by step.

    Args:
        rules: What it must keep.
        facts: What is known of it.
        strictness: Divides the limits of the rules: 2 finds what is half as large.
        limits: What the user sets in place of the rules' own limits, by the rule's name and the limit's.

    Attributes:
        unknown: What could not be judged so far: sentences, in the order in which they were found out.
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

    def step(self, table: Mapping[Key, Entry], *, step: int) -> list[Finding]:
        """What is wrong in a step, in the order of execution."""
        return self._judged(self._rules, table, step=step)

    def unfinished(self, table: Mapping[Key, Entry], *, step: int) -> list[Finding]:
        """What is wrong in a step that ended before the optimizer was called, in the order of execution."""
        return self._judged([rule for rule in self._rules if rule.judges_unfinished], table, step=step)

    def _judged(self, rules: Iterable[Rule], table: Mapping[Key, Entry], *, step: int) -> list[Finding]:
        found = [finding for rule in rules for finding in rule.step(table, step=step)]
        self._found.update((finding.kind, finding.path) for finding in found)
        return sorted(found, key=lambda finding: finding.order)

    def is_warning(self, finding: Finding) -> bool:
        """Whether a finding is of a rule that warns."""
        return any(finding.kind in rule.kinds for rule in self._rules if rule.warns)

    def note_unknown(self, table: Mapping[Key, Entry]) -> None:
        """Remember what of a step the rules cannot judge."""
        for rule in self._rules:
            self.unknown.update(dict.fromkeys(rule.unknown(table)))

    def end(self) -> list[Finding]:
        """What can be told only now that the run is over, and was not told of a step."""
        found = [finding for rule in self._rules for finding in rule.end()]
        fresh = [finding for finding in found if (finding.kind, finding.path) not in self._found]
        return sorted(fresh, key=lambda finding: (finding.step, finding.order))

    def notes(self) -> list[str]:
        """What is worth knowing of the run, now that it is over."""
        return [note for rule in self._rules for note in rule.notes()]
