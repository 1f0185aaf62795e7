"""The results of `traindiff investigate` and of a grid of verifications."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from traindiff.analyse.compare.verdict import EXIT_CODES, Comparison, Word
from traindiff.analyse.compare.verification import RunCost, Sides, Verification
from traindiff.analyse.story import investigation_sections, plain

MATRIX_SCHEMA_NAME = "traindiff-matrix"
MATRIX_SCHEMA_VERSION = 1

IMPOSSIBLE, REFUSED = "impossible", "refused"
"""Words beside those of a verdict: this machine cannot run the combination; the recipe does not support it."""

_UNUSABLE = 2
_WORST = (1, 3, _UNUSABLE, 0)
"""Exit codes, the worst first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixRow:
    """One combination of a grid.

    Attributes:
        name: The settings that vary: `engine=ddp, dtype=float32`.
        varied: The same, by setting.
        verdict: A word of a verdict, `impossible`, or `refused`.
        message: The first divergence, if there is one; for a combination that was not run, the reason.
        seconds: Its time without a share of the baseline; 0 if it was not run.
        output: Directory of its recordings and report.
        exit_code: That `traindiff verify` would have; 0 for one that is impossible here.
        kept: Whether an earlier call finished it.
    """

    name: str
    varied: Mapping[str, Any]
    verdict: str
    message: str
    seconds: float
    output: str
    exit_code: int
    kept: bool = False

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """The combinations of a grid, each with its verdict.

    Attributes:
        recipe: The trusted training.
        output: Directory of all recordings and reports.
        rows: The combinations, in the order of the grid.
    """

    recipe: str
    output: str
    rows: tuple[MatrixRow, ...]

    @property
    def exit_code(self) -> int:
        """The worst code of those that ran: 1 if one diverged, else 3, else 2, else 0; 2 if none could be run."""
        ran = [row.exit_code for row in self.rows if row.verdict != IMPOSSIBLE]
        return min(ran, key=_WORST.index) if ran else _UNUSABLE

    def to_json(self) -> dict[str, Any]:
        """The result in the schema of `--json`, as JSON values."""
        return {
            "schema": {"name": MATRIX_SCHEMA_NAME, "version": MATRIX_SCHEMA_VERSION},
            "recipe": self.recipe,
            "output": self.output,
            "rows": [row.to_json() for row in self.rows],
        }


SCHEMA_NAME = "traindiff-investigation"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One question of an investigation, with its answer.

    Attributes:
        name: A word or two; the same in every investigation.
        asks: The question.
        message: The conclusion, one sentence or two.
        numbers: The numbers behind it, by name.
        final: Whether no further question follows.
    """

    name: str
    asks: str
    message: str
    numbers: Mapping[str, Any]
    final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Investigation:
    """The result of `traindiff.investigate`; `str()` of it is the story in the terminal.

    Attributes:
        sides: Baseline and candidate.
        stages: Questions and answers, in order.
        free: Baseline against candidate as they are; None if it did not come to that.
        steady: The same without anything that may vary, with forced runs and operators; None if it did not come to
            that.
        verdict: That of `free`, or `misaligned` if the baseline is not the same training when it is called again, or
            `incomplete` if it fails.
        output: Directory of the recordings, of `report.txt`, `investigation.json` and, for two runs that differ,
            `report.html`.
        costs: Cost of each run, in order.
        peak_bytes: Largest resident memory of the processes of a run together.
    """

    sides: Sides
    stages: tuple[Stage, ...]
    free: Verification | None
    steady: Verification | None
    verdict: Word
    output: str
    costs: tuple[RunCost, ...]
    peak_bytes: int = 0

    @property
    def deciding(self) -> Verification | None:
        """The verification on which the last stages rest."""
        return self.steady or self.free

    @property
    def comparison(self) -> Comparison | None:
        """The comparison on which the last stages rest."""
        return self.deciding.comparison if self.deciding else None

    @property
    def exit_code(self) -> int:
        """Exit code of `traindiff investigate`: 0 identical or equivalent, 1 diverged, 3 otherwise."""
        return EXIT_CODES[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """The result in the schema of `--json`, as JSON values."""
        return {
            "schema": {"name": SCHEMA_NAME, "version": SCHEMA_VERSION},
            "verdict": self.verdict,
            "sides": [side.to_json() for side in self.sides],
            "stages": [asdict(stage) for stage in self.stages],
            "output": self.output,
            "free": self.free.to_json() if self.free else None,
            "steady": self.steady.to_json() if self.steady else None,
            "costs": [asdict(one) for one in self.costs],
            "peak_bytes": self.peak_bytes,
            "next": self.deciding.commands() if self.deciding else [],
        }

    def __str__(self) -> str:
        return plain(investigation_sections(self))
