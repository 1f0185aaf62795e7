"""The result of a comparison: findings, one word, and the numbers behind it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from traindiff.analyse import next_commands
from traindiff.analyse.align.pairs import Unaligned
from traindiff.analyse.compare.operator_localization import OperatorLocalization
from traindiff.analyse.findings import SITE_WORDS, Finding, SiteWord, finite, ratio_of
from traindiff.analyse.merge.history import DifferenceHistory
from traindiff.analyse.signs import Similarities
from traindiff.analyse.story import of_comparison
from traindiff.core.shown import Shown
from traindiff.core.site import ROOT

Word = Literal["identical", "equivalent", "diverged", "misaligned", "incomplete"]

EXIT_CODES: Mapping[Word, int] = {"identical": 0, "equivalent": 0, "diverged": 1, "misaligned": 3, "incomplete": 3}
"""Exit codes of the commands that give a verdict."""

SCHEMA_NAME = "traindiff-comparison"

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteDifference:
    """The weightiest difference seen at one site over all compared steps.

    Of several steps, the one with the last word of `SITE_WORDS` counts, then the one with the largest ratio.

    Attributes:
        phase: Phase of the observation.
        stage: Stage within the phase.
        path: Canonical path; empty for the root.
        slot: Which tensor there.
        call: Which call of the module in the micro-step.
        step: The step that counts.
        order: Place in the baseline's execution order in it.
        difference: Relative L2 difference in it; inf if it has no size.
        floor: Noise floor in it, from the differences measured at the inputs.
        undisturbed: The same for inputs that agree within noise.
        word: The meaning of the difference.
        first_other_bits: The first step in which the bits differ; None if they are not known to differ.
        num_steps: Number of steps in which the site was compared.
        num_identical_steps: Number of those with the same bits.
    """

    phase: str
    stage: str
    path: str
    slot: str
    call: int
    step: int
    order: int
    difference: float
    floor: float
    undisturbed: float
    word: SiteWord
    first_other_bits: int | None = None
    num_steps: int
    num_identical_steps: int

    @property
    def ratio(self) -> float:
        """Difference over floor; inf for differences without a size."""
        return ratio_of(self.difference, self.floor)

    @property
    def weight(self) -> tuple[int, float]:
        """How much the difference weighs: its word, then its ratio."""
        return SITE_WORDS.index(self.word), self.ratio

    def joined(self, later: SiteDifference) -> SiteDifference:
        """One row of this one and of a row of the same site in later steps."""
        return replace(
            later if later.weight > self.weight else self,
            first_other_bits=later.first_other_bits if self.first_other_bits is None else self.first_other_bits,
            num_steps=self.num_steps + later.num_steps,
            num_identical_steps=self.num_identical_steps + later.num_identical_steps,
        )

    def to_json(self) -> dict[str, Any]:
        """The site in the schema of `--json`; sizes that are not finite become null."""
        return {
            "phase": self.phase,
            "stage": self.stage,
            "site": self.path or ROOT,
            "slot": self.slot,
            "call": self.call,
            "word": self.word,
            "step": self.step,
            "difference": finite(self.difference),
            "floor": finite(self.floor),
            "undisturbed_floor": finite(self.undisturbed),
            "ratio": finite(self.ratio),
            "first_other_bits": self.first_other_bits,
            "num_steps": self.num_steps,
            "num_identical_steps": self.num_identical_steps,
        }


def joined_rows(rows: Iterable[SiteDifference]) -> tuple[SiteDifference, ...]:
    """One row for each site, from rows of consecutive steps."""
    found: dict[tuple[str, str, str, str, int], SiteDifference] = {}
    for row in rows:
        site = (row.phase, row.stage, row.path, row.slot, row.call)
        held = found.get(site)
        found[site] = row if held is None else held.joined(row)
    return tuple(found.values())


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison(Shown):
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
        first_bit_difference: The first site in execution order whose bits are known to differ; None if there is none.
        accepted_sites: Number of sites that differ and are accepted, so that they are no findings.
        ignored_sites: The same for ignored sites.
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
    first_bit_difference: Finding | None = None
    accepted_sites: int = 0
    ignored_sites: int = 0

    @property
    def first_divergence(self) -> Finding | None:
        """The first finding in execution order; None where there is none."""
        return self.findings[0] if self.findings else None

    @property
    def words(self) -> dict[SiteWord, int]:
        """Number of sites with each word."""
        return {word: sum(row.word == word for row in self.differences) for word in SITE_WORDS}

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
            "first_bit_difference": None if self.first_bit_difference is None else self.first_bit_difference.to_json(),
            "findings": [finding.to_json() for finding in self.findings],
            "representation": [finding.to_json() for finding in self.representation],
            "unaligned": [[one.to_json() for one in side] for side in self.unaligned],
            "words": self.words,
            "sites": [row.to_json() for row in self.differences if row.word != "identical"],
            "accepted_sites": self.accepted_sites,
            "ignored_sites": self.ignored_sites,
            "noise": None if self.noise is None else dict(self.noise),
            "steps": list(self.steps),
            "notes": list(self.notes),
            "directions": None if self.directions is None else self.directions.to_json(),
            "operators": [zoom.to_json() for zoom in self.zooms],
            "next": next_commands.of_comparison(
                self.baseline, self.candidate, findings=self.findings, word=self.verdict, calibrated=self.calibrated
            ),
        }

    def __str__(self) -> str:
        return str(of_comparison(self))
