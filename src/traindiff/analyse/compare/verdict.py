"""The result of a comparison: findings, one word, and the numbers behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from traindiff.analyse.align.pairs import Unaligned
from traindiff.analyse.compare.operator_localization import OperatorLocalization
from traindiff.analyse.findings import Finding, ratio_of
from traindiff.analyse.merge.history import DifferenceHistory
from traindiff.analyse.signs import Similarities
from traindiff.analyse.story import of_comparison

Word = Literal["identical", "equivalent", "diverged", "misaligned", "incomplete"]

EXIT_CODES: Mapping[Word, int] = {"identical": 0, "equivalent": 0, "diverged": 1, "misaligned": 3, "incomplete": 3}
"""Exit codes of the commands that give a verdict."""

SCHEMA_NAME = "traindiff-comparison"

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteDifference:
    """The largest difference seen at one site over all compared steps, in units of its floor."""

    phase: str
    stage: str
    path: str
    slot: str
    call: int
    step: int
    order: int
    difference: float
    floor: float
    num_steps: int
    num_identical_steps: int

    @property
    def ratio(self) -> float:
        """Difference over floor; inf for differences without a size."""
        return ratio_of(self.difference, self.floor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result of comparing two recordings; `str()` of it is the report in the terminal.

    Attributes:
        baseline: Path of the baseline.
        candidate: Path of the candidate.
        verdict: `identical`, `equivalent`, `diverged`, `misaligned` or `incomplete`.
        calibrated: Whether floors were measured; if not, they follow from the dtypes' rounding.
        findings: All findings, in execution order.
        unaligned: Sites of the baseline only, and of the candidate only.
        steps: Steps that were compared, ascending.
        notes: What limits the verdict, one sentence each.
        differences: Per site, its largest difference, in execution order.
        noise: What measured floors rest on: recordings, constants; None where none were given.
        representation: What differs only in how it is represented (activations, the order of samples or
            channels), where no loss, gradient or update differs; such differences are no findings.
        zooms: Findings, taken apart into the operators of their modules, where both runs have recorded these.
        history: Every site's difference in every step; None unless it was asked for. No part of the JSON.
        directions: How many elements of gradients have the same direction in both runs; None where one has no signs.
    """

    baseline: str
    candidate: str
    verdict: Word
    calibrated: bool
    findings: tuple[Finding, ...]
    unaligned: tuple[tuple[Unaligned, ...], tuple[Unaligned, ...]]
    steps: tuple[int, ...]
    notes: tuple[str, ...]
    differences: tuple[SiteDifference, ...]
    noise: Mapping[str, Any] | None = None
    representation: tuple[Finding, ...] = ()
    zooms: tuple[OperatorLocalization, ...] = ()
    history: DifferenceHistory | None = field(default=None, compare=False, repr=False)
    directions: Similarities | None = None

    @property
    def first_divergence(self) -> Finding | None:
        """The first finding in execution order; None where there is none."""
        return self.findings[0] if self.findings else None

    @property
    def exit_code(self) -> int:
        """Exit code of `traindiff compare`: 0 identical or equivalent, 1 diverged, 3 otherwise."""
        return EXIT_CODES[self.verdict]

    def to_json(self) -> dict[str, Any]:
        """The result in the schema of `--json`, as JSON values."""
        first = self.first_divergence
        return {
            "schema": {"name": SCHEMA_NAME, "version": SCHEMA_VERSION},
            "baseline": self.baseline,
            "candidate": self.candidate,
            "verdict": self.verdict,
            "calibrated": self.calibrated,
            "first_divergence": first.to_json() if first else None,
            "findings": [finding.to_json() for finding in self.findings],
            "representation": [finding.to_json() for finding in self.representation],
            "unaligned": [[one.to_json() for one in side] for side in self.unaligned],
            "noise": None if self.noise is None else dict(self.noise),
            "steps": list(self.steps),
            "notes": list(self.notes),
            "directions": None if self.directions is None else self.directions.to_json(),
            "operators": [zoom.to_json() for zoom in self.zooms],
        }

    def __str__(self) -> str:
        return str(of_comparison(self))
