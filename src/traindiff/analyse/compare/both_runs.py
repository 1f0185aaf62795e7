"""What is wrong with one of two runs by itself, and tells it from the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from traindiff.analyse.align.two_runs import RUNS
from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.step_table import Entry, Key
from traindiff.analyse.rules import RULES, RunFacts
from traindiff.analyse.rules.run_judge import RunJudge

LENIENT = 2.0
"""What one run has clearly, the other has if it shows half as clearly: then it does not tell them apart."""

_NO_NAMES = frozenset({"A", "An", "Rank", "Ranks", "Stage", "The"})
"""Words that begin a sentence with a capital letter, and would not within it."""


class BothRuns:
    """Holds each of two runs against the rules.

    Args:
        facts: What is known of each run.

    Attributes:
        shared: What is wrong in both runs, so that it does not tell them apart: one sentence per kind.
    """

    def __init__(self, facts: Sequence[RunFacts]) -> None:
        rules = [rule for rule in RULES if rule.tells_runs_apart]
        self._strict = [RunJudge(rules, one) for one in facts]
        self._lenient = [RunJudge(rules, one, strictness=LENIENT) for one in facts]
        self.shared: dict[str, str] = {}

    @property
    def unknown(self) -> list[str]:
        """What rules could not judge, and the comparison judges by the other run only: one sentence each."""
        return [
            f"{name}: {_within(reason)}, so it is judged by the other run only."
            for name, judge in zip(RUNS, self._strict, strict=True)
            for reason in judge.unknown
        ]

    def findings(self, tables: Sequence[Mapping[Key, Entry]], *, step: int) -> list[Finding]:
        """What is wrong with one run of the two and not with the other, labeled with which it is."""
        for judge, table in zip(self._strict, tables, strict=True):
            judge.note_unknown(table)
        strict = [judge.step(table, step=step) for judge, table in zip(self._strict, tables, strict=True)]
        lenient = [
            {_what(one) for one in judge.step(table, step=step)}
            for judge, table in zip(self._lenient, tables, strict=True)
        ]
        found = []
        for name, own, other in zip(RUNS, strict, lenient[::-1], strict=True):
            for one in own:
                if one.kind == "lost-update" and one.path in {path for _, path in other - {_what(one)}}:
                    continue  # worse than lost there, and said of that run
                if _what(one) in other:
                    self.shared.setdefault(one.kind, f"In both runs: {_within(one.message)}")
                else:
                    message = f"In the {name}, {_within(one.message)}"
                    found.append(replace(one, message=message, evidence={**one.evidence, "run": name}))
        return found


def _what(finding: Finding) -> tuple[str, str]:
    return finding.kind, finding.path


def _within(sentence: str) -> str:
    """A sentence as it stands behind other words; names of classes and parameters stay as they are."""
    first, space, rest = sentence.partition(" ")
    return f"{first.lower() if first in _NO_NAMES else first}{space}{rest}"
