"""The result of `traindiff.resume`: what was not restored, and how the steps after it compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from traindiff.analyse import next_commands
from traindiff.analyse.compare.verdict import EXIT_CODES, Comparison, Word
from traindiff.analyse.compare.verification import RunCost

SCHEMA_NAME = "traindiff-resumption"

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDifference:
    """Something that is not as it was saved.

    Attributes:
        what: What it is of: `parameter`, `optimizer-state`, `setting`, `buffer`, `scheduler`, `scaler`, `generator`,
            `weights`, `tensor`, `object`, `optimizer` (another one), `counter` or `saving`.
        sites: Paths of parameters or names of objects.
        message: A sentence.
        evidence: Numbers that show it.
    """

    what: str
    sites: tuple[str, ...]
    message: str
    evidence: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON values."""
        return {"what": self.what, "sites": list(self.sites), "says": self.message, "evidence": dict(self.evidence)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """What a training lost when it was saved and loaded; `str()` of it is the report in the terminal.

    Attributes:
        recipe: Name of the recipe.
        setups: How the training was run before saving, and after loading, in a line each.
        at: Steps before saving.
        differences: What was not restored before the first step.
        notes: What limits the verdict, one sentence each.
        comparison: The steps after loading against those of a training that never stopped.
        runs: What each run took.
    """

    recipe: str
    setups: tuple[str, str]
    at: int
    differences: tuple[StateDifference, ...]
    notes: tuple[str, ...]
    comparison: Comparison
    runs: tuple[RunCost, ...]

    @property
    def verdict(self) -> Word:
        """`diverged` if the state or a step differs; else the word of the comparison."""
        if self.differences or self.comparison.findings:
            return "diverged"
        return self.comparison.verdict

    @property
    def exit_code(self) -> int:
        """Exit code of `traindiff resume`: 0 identical or equivalent, 1 diverged, 3 incomplete."""
        return EXIT_CODES[self.verdict]

    @property
    def message(self) -> str:
        """The verdict in a sentence."""
        if self.verdict == "diverged":
            return f"diverged: the training that was resumed after {self.at} steps is another one"
        if self.verdict == "incomplete":
            return f"incomplete: not everything of the steps after step {self.at - 1} could be compared"
        exactly = "exactly " if self.verdict == "identical" else ""
        return f"{self.verdict}: the training goes on {exactly}as if it had never stopped after {self.at} steps"

    def to_json(self) -> dict[str, Any]:
        """The result in the schema of `--json`, as JSON values."""
        return {
            "schema": {"name": SCHEMA_NAME, "version": SCHEMA_VERSION},
            "recipe": self.recipe,
            "setups": list(self.setups),
            "verdict": self.verdict,
            "at": self.at,
            "differences": [one.to_json() for one in self.differences],
            "notes": list(self.notes),
            "comparison": self.comparison.to_json(),
            "runs": [asdict(one) for one in self.runs],
            "next": next_commands.explaining(one.what for one in self.differences),
        }

    def __str__(self) -> str:
        differences = [one.message for one in self.differences]
        return "\n".join([self.message, *differences, *self.notes, str(self.comparison)])
