"""What a check of one run says: findings and one word."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from traindiff.findings import Finding
from traindiff.findings.groups import grouped
from traindiff.findings.sentences import also_text, steps_text, where_text
from traindiff.health.history import RunHistory

Word = Literal["healthy", "unhealthy", "incomplete"]

EXIT_CODES: Mapping[Word, int] = {"healthy": 0, "unhealthy": 1, "incomplete": 3}
"""Exit codes of `traindiff check`."""

SCHEMA_NAME = "traindiff-check"
SCHEMA_VERSION = 1

MEANINGS: Mapping[Word, str] = {
    "healthy": "no rule is broken",
    "unhealthy": "the run breaks rules that it should keep by itself",
    "incomplete": "no rule is broken in what was recorded, but a part of the run was not",
}
"""What each word means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of checking one recording; `str()` of it is the report in the terminal.

    Attributes:
        recording: Its path.
        verdict: `healthy`, `unhealthy` or `incomplete`.
        findings: What is wrong, in the order of the training; of what is wrong in several steps, the first, with
            `num_steps` in its evidence.
        warnings: What is worth knowing and leaves the run healthy, in the same order.
        steps: Steps that were checked, ascending.
        ranks: Ranks that were recorded.
        notes: What limits the verdict, one sentence each.
        history: The size of every site in every step; None unless it was asked for. No part of the JSON.
    """

    recording: str
    verdict: Word
    findings: tuple[Finding, ...]
    warnings: tuple[Finding, ...] = ()
    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    notes: tuple[str, ...]
    history: RunHistory | None = field(default=None, compare=False, repr=False)

    @property
    def exit_code(self) -> int:
        """Exit code of `traindiff check`: 0 healthy, 1 unhealthy, 3 incomplete."""
        return EXIT_CODES[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """The result in the schema of `--json`, as JSON values."""
        return {
            "schema": {"name": SCHEMA_NAME, "version": SCHEMA_VERSION},
            "recording": self.recording,
            "verdict": self.verdict,
            "findings": [finding.to_json() for finding in self.findings],
            "warnings": [warning.to_json() for warning in self.warnings],
            "steps": list(self.steps),
            "ranks": list(self.ranks),
            "notes": list(self.notes),
        }

    def sentence(self) -> str:
        """The word, what it means, and what was checked."""
        if not self.steps:
            return f"{self.verdict}: nothing could be checked"
        count = len(self.ranks)
        where = f" on {count} ranks" if count > 1 else ""
        warned = len(grouped(self.warnings))
        also = f"; {warned} warning{'s' if warned > 1 else ''}" if warned else ""
        return f"{self.verdict}: {MEANINGS[self.verdict]}, over {steps_text(self.steps)}{where}{also}"

    def __str__(self) -> str:
        lines = [self.sentence()]
        for word, findings in (("", self.findings), ("Warning: ", self.warnings)):
            for group in grouped(findings):
                says = " ".join(filter(None, (group.first.says, also_text(group.paths))))
                lines += ["", f"{word}{where_text(group.first)}", f"  {says}"]
        return "\n".join([*lines, *([""] if self.notes else []), *self.notes])
