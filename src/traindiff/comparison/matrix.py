"""What `traindiff verify --matrix` says: a verdict for each combination."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

SCHEMA_NAME = "traindiff-matrix"
SCHEMA_VERSION = 1

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
        says: Of a combination with a finding, the first divergence; of one that was not run, why.
        seconds: What it took, its share of the baseline left out; 0 where it was not run.
        output: Directory of its recordings and report.
        exit_code: That `traindiff verify` would have; 0 for one that is impossible here.
        kept: Whether it was finished by an earlier call.
    """

    name: str
    varied: Mapping[str, Any]
    verdict: str
    says: str
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
            "schema": {"name": SCHEMA_NAME, "version": SCHEMA_VERSION},
            "recipe": self.recipe,
            "output": self.output,
            "rows": [row.to_json() for row in self.rows],
        }
