"""What `traindiff investigate` says: a verification, stage by stage, each with its conclusion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from traindiff.analyse.compare.verdict import EXIT_CODES, Comparison, Word
from traindiff.analyse.compare.verification import RunCost, Sides, Verification
from traindiff.analyse.story import investigation_sections, plain

MATRIX_SCHEMA_NAME = "traindiff-matrix"
MATRIX_SCHEMA_VERSION = 1

IMPOSSIBLE, REFUSED = "impossible", "refused"
"""Words beside those of a verdict: this machine cannot run the combination; the recipe cannot be used for it."""

_UNUSABLE = 2
_WORST = (1, 3, _UNUSABLE, 0)
"""Exit codes, the worst first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixRow:
    """One combination.

    Attributes:
        name: The settings that vary: `engine=ddp, dtype=float32`.
        varied: The same, by setting.
        verdict: A word of a verdict, `impossible`, or `refused`.
        message: Of a combination with a finding, the first divergence; of one that was not run, why.
        seconds: What it took, its share of the baseline left out; 0 where it was not run.
        output: Directory of its recordings and report.
        exit_code: That `traindiff verify` would have; 0 for one that is impossible here.
        kept: Whether it was finished by an earlier call.
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

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """What `to_json` made."""
        return cls(**content)


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
        """The worst of those that ran: 1 where one diverged, else 3, else 2, else 0; 2 where none could be run."""
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
        name: What is asked, in a word or two; the same in every investigation.
        asks: The question.
        message: The conclusion, one sentence or two.
        numbers: What it rests on, by name.
        final: Whether nothing needs to be asked after it.
    """

    name: str
    asks: str
    message: str
    numbers: Mapping[str, Any]
    final: bool = False

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON values."""
        return {
            "name": self.name,
            "asks": self.asks,
            "message": self.message,
            "numbers": dict(self.numbers),
            "final": self.final,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Investigation:
    """The result of `traindiff.investigate`; `str()` of it is the story in the terminal.

    Attributes:
        sides: What was run.
        stages: What was asked, in order, and what was found.
        free: Baseline against candidate as they are; None where it did not come to that.
        steady: The same with all taken out that may vary, pinned down and zoomed into; None where it did not come to
            that.
        verdict: The word: that of `free`, or `misaligned` where the baseline is not the same training when it is called
            again.
        output: Directory of the recordings, of `report.txt`, `investigation.json` and, of two runs that differ,
            `report.html`.
        costs: What each run took, in order.
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
            "stages": [stage.to_json() for stage in self.stages],
            "output": self.output,
            "free": self.free.to_json() if self.free else None,
            "steady": self.steady.to_json() if self.steady else None,
            "costs": [{"name": one.name, "num_steps": one.num_steps, "seconds": one.seconds} for one in self.costs],
            "peak_bytes": self.peak_bytes,
        }

    def __str__(self) -> str:
        return plain(investigation_sections(self))
