"""What a check of one run says: findings and one word."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from traindiff.analyse.findings import Finding, also_text, grouped, steps_text, where_text
from traindiff.analyse.merge.history import History
from traindiff.analyse.merge.step_table import Entry, Key, scalar_entry
from traindiff.core.observation import ALL_GRADIENTS, SAMPLE
from traindiff.core.summary import UNIT_ROUNDOFF, largest, nonfinite_count, norm, number

FIELDS = ("order", "size", "largest", "zero", "nonfinite")
"""Numbers of a site in a step: what decides which step of a column is kept (the L2 norm, inf where not finite), the
norm (of a single element its value), the largest |x|, and the shares of zeros and of elements that are not finite."""


_NORM = Key("grad", "", ALL_GRADIENTS, "norm", 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extreme:
    """A site in the step in which its norm is largest, or in the first in which it is not finite.

    Attributes:
        step: That step.
        size: Its norm; inf where it is not finite.
        order: Place in execution order, in the first step that has the site.
        dtype: Of the tensor.
        shape: Of the tensor.
        summary: Of the tensor.
    """

    step: int
    size: float
    order: int
    dtype: str
    shape: tuple[int, ...]
    summary: Any


class RunHistory:
    """The sizes of all sites of a run in all steps, in bounded memory.

    Attributes:
        whole: By site.
        extremes: Each site where it is largest.
    """

    def __init__(self) -> None:
        self.whole: History[Key] = History(FIELDS)
        self.extremes: dict[Key, Extreme] = {}

    def note(self, table: Mapping[Key, Entry], step: int) -> None:
        """Remember what a step has: all that are no whole numbers, and the norm of all gradients.

        Args:
            table: Entries of the step.
            step: Its number.
        """
        gradients = [
            entry
            for key, entry in table.items()
            if key.phase == "grad" and key.slot == "grad" and not key.stage and not entry.unobserved
        ]
        if gradients:
            bad = any(nonfinite_count(entry.summary) for entry in gradients)
            size = math.nan if bad else math.sqrt(sum(float(entry.summary["sum_of_squares"]) for entry in gradients))
            order = max(entry.order for entry in gradients)
            self._site(_NORM, scalar_entry(_NORM, size, order=order), step)
        for key, entry in table.items():
            if not entry.unobserved and key.stage != SAMPLE and entry.dtype in UNIT_ROUNDOFF:
                self._site(key, entry, step)

    def _site(self, key: Key, entry: Entry, step: int) -> None:
        summary = entry.summary
        count = int(summary["count"])
        single = entry.shape == () and count == 1
        size = number(summary) if single else float(norm(summary))
        bad = int(nonfinite_count(summary))
        place = math.inf if bad or math.isnan(size) else abs(size)
        zero = int(summary["zero"]) / count if count else 0.0
        self.whole.note(key, step, (place, size, float(largest(summary)), zero, bad / count if count else 0.0))
        held = self.extremes.get(key)
        if held is None or place > held.size:
            self.extremes[key] = Extreme(
                step=step,
                size=place,
                order=held.order if held else entry.order,  # orders of one step compare, of several need not
                dtype=entry.dtype,
                shape=entry.shape,
                summary=np.array(summary)[()],  # a copy: a summary would keep its step's array in memory
            )


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
                message = " ".join(filter(None, (group.first.message, also_text(group.paths))))
                lines += ["", f"{word}{where_text(group.first)}", f"  {message}"]
        return "\n".join([*lines, *([""] if self.notes else []), *self.notes])
