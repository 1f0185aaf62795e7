"""What a comparison says: findings, one word, and the numbers behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from traindiff.analyse.align.pairs import Unaligned
from traindiff.analyse.align.ranks import differences_by_rank
from traindiff.analyse.compare.zoom import Zoom
from traindiff.analyse.findings import Finding, ratio_of
from traindiff.analyse.merge.distance import Pair
from traindiff.analyse.merge.history import History
from traindiff.analyse.merge.step_table import Entry, Key
from traindiff.analyse.signs import Similarities
from traindiff.analyse.story import of_comparison
from traindiff.core.summary import norm, number

FIELDS = ("ratio", "difference", "floor", "baseline", "candidate")
"""Numbers of a site in a step; the last two are the sizes of both sides: L2 norms, or of a single element its value."""

NOT_JUDGED = 1e-30
"""Ratio that stands for a difference whose floor is without bound: of several steps, it is kept before equal bits."""

MAX_RANKS = 16
"""Ranks that are kept one by one, the first of them; what others hold is part of the whole only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Farthest:
    """A site in the step in which its difference is largest, in units of its floor.

    Attributes:
        step: That step.
        ratio: Difference over floor in it.
        order: Place in the baseline's execution order, in the first step that has the site.
        dtypes: Of both sides.
        shapes: Of both sides.
        summaries: Of both sides.
    """

    step: int
    ratio: float
    order: int
    dtypes: tuple[str, str]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    summaries: tuple[Any, Any]


class DifferenceHistory:
    """Differences of all sites in all steps, in bounded memory.

    Attributes:
        whole: By site.
        by_rank: By site and rank, where several ranks of both runs hold the same parts; only the ratio.
        farthest: Each site where it is farthest from the baseline.
    """

    def __init__(self) -> None:
        self.whole: History[Key] = History(FIELDS)
        self.by_rank: History[tuple[Key, int]] = History(FIELDS[:1])
        self.farthest: dict[Key, Farthest] = {}

    def note(self, pair: Pair, step: int, size: float, floor: float) -> None:
        """Remember what was measured at a site.

        Args:
            pair: The site.
            step: Its step.
            size: Relative L2 difference; inf where it has no size.
            floor: The largest difference that would have been no finding.
        """
        key, ratio = pair.baseline.key, ratio_of(size, floor)
        judged = ratio > 0 or size == 0
        self.whole.note(
            key, step, (ratio if judged else NOT_JUDGED, size, floor, _size(pair.baseline), _size(pair.candidate))
        )
        held = self.farthest.get(key)
        if held is None or ratio > held.ratio:
            sides = (pair.baseline, pair.candidate)
            self.farthest[key] = Farthest(
                step=step,
                ratio=ratio,
                order=held.order if held else pair.baseline.order,  # orders of one step compare, of several need not
                dtypes=(pair.baseline.dtype, pair.candidate.dtype),
                shapes=(pair.baseline.shape, pair.candidate.shape),
                # Copies: a summary is a row of its step's array, and would keep it in memory.
                summaries=(np.array(sides[0].summary)[()], np.array(sides[1].summary)[()]),
            )
        if judged and len(pair.candidate.parts) > 1:
            for rank, apart in differences_by_rank(pair).items():
                if rank < MAX_RANKS:
                    self.by_rank.note((key, rank), step, (ratio_of(apart, floor),))


def _size(entry: Entry) -> float:
    if entry.shape == () and int(entry.summary["count"]) == 1:
        return number(entry.summary)
    return float(norm(entry.summary))


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
    zooms: tuple[Zoom, ...] = ()
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
