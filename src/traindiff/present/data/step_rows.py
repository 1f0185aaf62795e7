"""All sites of a step in execution order, both runs next to each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from rich.console import Console
from rich.text import Text

from traindiff.analyse.compare import Comparison
from traindiff.analyse.findings import SITE_WORDS, SiteWord, phase_text, ratio_of
from traindiff.analyse.merge.history import DifferenceHistory
from traindiff.analyse.merge.site import SiteKey
from traindiff.core.site import ROOT, label
from traindiff.core.steps import StepSelection, parse_steps
from traindiff.errors import ConfigError, Problem
from traindiff.present.data.as_csv import CsvRows
from traindiff.present.text.layout import print_line, print_table, told_apart
from traindiff.present.text.results import STYLES_OF_SITES

FIRST = "first"
"""Stands for the step of the first divergence, or for the first compared step where nothing diverges."""

COLUMNS = (
    "step", "phase", "stage", "site", "slot", "call", "micro_step", "baseline", "candidate", "difference", "floor",
    "ratio", "word", "first",
)  # fmt: skip
"""Columns of the table as comma-separated values. Sizes that are not finite are empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One site in one step, in both runs.

    Attributes:
        step: The step.
        key: The site.
        baseline: Its size in the baseline: the L2 norm, or the value of a single element.
        candidate: Its size in the candidate.
        difference: Relative L2 difference; inf where it has no size.
        floor: The noise floor; inf where nothing bounds the difference.
        word: The meaning of the difference.
        first: Whether this is the first divergence of the comparison.
    """

    step: int
    key: SiteKey
    baseline: float
    candidate: float
    difference: float
    floor: float
    word: SiteWord
    first: bool

    @property
    def ratio(self) -> float:
        """Difference over noise floor."""
        return ratio_of(self.difference, self.floor)


def parse_table(text: str) -> StepSelection | None:
    """The steps that `--table` asks for; None for the step of the first divergence.

    Raises:
        ConfigError: The text is neither steps nor `first`.
    """
    if text == FIRST:
        return None
    found = parse_steps(text, where=f"--table {text}")
    if isinstance(found, StepSelection):
        return found
    problem = Problem(where=found.where, what=found.what, fix=f'Write steps like "3" or "0-2,7", or "{FIRST}".')
    raise ConfigError("compare", [problem], consequence="nothing was compared")


def step_rows(comparison: Comparison, history: DifferenceHistory, steps: StepSelection | None) -> list[StepRow]:
    """The rows of the chosen steps, in execution order.

    Args:
        comparison: The result.
        history: Every site's difference in every step.
        steps: The chosen steps; None for the step of the first divergence.

    Raises:
        ConfigError: None of these steps was compared, or there were too many steps to keep each by itself.
    """
    first = comparison.first_divergence
    compared = comparison.steps
    if steps is None:
        chosen = list(compared[:1]) if first is None else [first.step]
    else:
        chosen = [step for step in compared if step in steps]
    if steps is not None and not chosen:
        span = f"{min(compared)} to {max(compared)}" if compared else "none"
        raise _refused(steps, what=f"names no step that was compared ({span}).", fix="Name some of those.")
    if history.whole.width > 1:
        fix = "Compare fewer steps, with --steps."
        raise _refused(steps, what=f"is for single steps, and {len(compared)} were compared.", fix=fix)
    rows = sorted(history.whole.sites.items(), key=lambda site: history.farthest[site[0]].order)
    return [row for step in chosen for row in _of_step(comparison, history, rows, step)]


def _of_step(
    comparison: Comparison, history: DifferenceHistory, sites: Sequence[tuple[SiteKey, int]], step: int
) -> Iterator[StepRow]:
    first = comparison.first_divergence
    column = history.whole.column_of(step)
    place = (first.phase, first.stage, first.path, first.slot, first.call) if first and first.step == step else None
    for key, row in sites:
        cell = dict(zip(history.whole.fields, map(float, history.whole.cells[row, column]), strict=True))
        weight = cell.pop("weight")
        if math.isnan(weight):
            continue  # the step has no such site
        is_first = place == key[:5]
        place = None if is_first else place
        yield StepRow(step=step, key=key, first=is_first, word=SITE_WORDS[int(weight)], **cell)


def print_rows(console: Console, rows: Sequence[StepRow]) -> None:
    """Print a table for each step."""
    for step in dict.fromkeys(row.step for row in rows):
        shown = [row for row in rows if row.step == step]
        apart, follow = (sum(row.word == word for row in shown) for word in ("above", "follows"))
        after = f", {follow} that follow from the first divergence" if follow else ""
        title = f"\nStep {step}: {len(shown)} sites in execution order, {apart} above their floors{after}"
        print_line(console, Text.assemble((title, "bold"), " (sizes are L2 norms, of single elements their values)"))
        print_table(
            console,
            list(map(_cells, shown)),
            left=("phase", "site"),
            right=("baseline", "candidate", "difference", "floor", "x floor"),
            last=("",),
            may_lack=("difference", "floor"),
            styles=[STYLES_OF_SITES.get(row.word) for row in shown],
        )


def _cells(row: StepRow) -> tuple[str, ...]:
    site = label(row.key.path, row.key.slot) + (f" call {row.key.call}" if row.key.call else "")
    site += f" micro-step {row.key.micro_step}" if row.key.micro_step else ""
    sizes = (*told_apart(row.baseline, row.candidate), *map(_digits, (row.difference, row.floor, row.ratio)))
    word = f"{row.word} (first)" if row.first else row.word
    return phase_text(row.key.phase, row.key.stage), site, *sizes, word


def _digits(value: float) -> str:
    return f"{value:.2g}" if math.isfinite(value) else "-"


def write_rows(file: IO[str], rows: Sequence[StepRow]) -> None:
    """Write the rows as comma-separated values."""
    writer = CsvRows(file, COLUMNS)
    for row in rows:
        key, bounded = row.key, not math.isinf(row.floor)
        sizes = (row.baseline, row.candidate, row.difference, row.floor, row.ratio if bounded else math.nan)
        cells = (
            row.step, key.phase, key.stage, key.path or ROOT, key.slot, key.call, key.micro_step,
            *(f"{size:.9g}" if math.isfinite(size) else "" for size in sizes), row.word, row.first,
        )  # fmt: skip
        writer.write(dict(zip(COLUMNS, cells, strict=True)))


def _refused(steps: StepSelection | None, *, what: str, fix: str) -> ConfigError:
    problem = Problem(where=f"--table {steps.text if steps else FIRST}", what=what, fix=fix)
    return ConfigError("compare", [problem], consequence="no table was printed")
