"""The content of a page about a comparison or a check, before it is written as HTML."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from traindiff.analyse.check import Verdict
from traindiff.analyse.compare import Comparison
from traindiff.analyse.findings import SITE_WORDS, Finding, Group, SiteWord, grouped, phase_text
from traindiff.analyse.merge.history import DifferenceHistory, RunHistory
from traindiff.analyse.products import ProductTable
from traindiff.analyse.rules.run_judge import Answer, AskedRule
from traindiff.analyse.story import Story, is_same_place, story_of
from traindiff.core.site import label
from traindiff.errors import ConfigError, Problem, RecordingError
from traindiff.present.page.dataflow import Node, dataflow
from traindiff.present.page.sites import (
    Place,
    ShownSites,
    SiteRow,
    curve_rows,
    data_of,
    in_execution_order,
    log_codes,
    numbers,
    packed,
    place_of,
    title_of,
)
from traindiff.storage import open_recording

_DRAWN = {
    "check": ("size", "largest", "zero", "nonfinite"),
    "comparison": ("difference", "floor", "baseline", "candidate"),
}
"""Numbers of a history that a page draws, by what the page is about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Findings that say the same of several sites, and the row of the first of them, if its site has one."""

    group: Group
    row: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline(Found):
    """The finding at the top of a page; its title says what it is the first of."""

    title: str

    @property
    def step(self) -> int:
        """Its step."""
        return self.group.first.step


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A line of the table of settings: a place in `run.json`, and its value in each run, empty if it has none."""

    name: str
    values: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """True if the runs differ in this setting."""
        return len(set(self.values)) > 1 and self.name != "created"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """All that a page shows.

    Attributes:
        about: `comparison` or `check`.
        story: What the report says.
        headline: The finding at the top, if there is one.
        facts: Numbers of what was compared or checked, with what they count.
        flow: The dataflow around the first finding: columns of sites.
        findings: All of them.
        representation: Differences in how things are represented.
        warnings: Findings that leave a run healthy.
        bits: The first difference in bits, where it is not the headline.
        alone: For each site that only one run has: which run, its phase, its name, the steps, and why.
        products: How exact matrix products are; None if that was not recorded.
        rules: The rules that a run was held against, those that found something first.
        settings: What the runs say of themselves.
        order: By row, which site of the history it is.
        data: For the script: rows, columns, numbers, curves.
    """

    about: Literal["comparison", "check"]
    story: Story
    headline: Headline | None
    facts: tuple[tuple[int, str], ...]
    flow: Sequence[Sequence[Node]] = ()
    findings: tuple[Found, ...]
    representation: tuple[Found, ...] = ()
    warnings: tuple[Found, ...] = ()
    bits: Found | None = None
    alone: tuple[tuple[str, ...], ...] = ()
    products: ProductTable | None = None
    rules: Sequence[AskedRule] = ()
    settings: Sequence[Setting]
    order: Sequence[int]
    data: Mapping[str, Any]

    @property
    def title(self) -> str:
        """The title of the browser's tab."""
        return f"{self.story.word}: {' and '.join(path for _, path in self.story.recordings)}"

    @property
    def rest(self) -> str:
        """The rest of the verdict's sentence, after the word of the verdict."""
        return self.story.sentence.removeprefix(self.story.word).removeprefix(" ")


def page_of(result: Comparison | Verdict) -> Page:
    """The page of a result.

    Args:
        result: Of `compare(..., history=True)` or `check(..., history=True)`.

    Raises:
        ConfigError: The result has no history.
    """
    if isinstance(result, Comparison) and result.history is not None:
        return _of_comparison(result, result.history)
    if isinstance(result, Verdict) and result.history is not None:
        return _of_check(result, result.history)
    name = "compare" if isinstance(result, Comparison) else "check"
    problem = Problem(
        where=f"the result of {name}(...)",
        what="does not hold the numbers of every step, which a page shows.",
        fix=f"Call {name}(..., history=True).",
    )
    raise ConfigError("report", [problem], consequence="nothing was written")


_ANSWERS = get_args(Answer)


def _of_check(verdict: Verdict, history: RunHistory) -> Page:
    sites = in_execution_order(
        SiteRow(
            place=key[:5], micro_step=key.micro_step, order=one.order, step=one.step, dtypes=(one.dtype,),
            shapes=(one.shape,), summaries=(one.summary,),
        )
        for key in history.whole.sites
        for one in [history.extremes[key]]
    )  # fmt: skip
    story, recordings, findings = story_of(verdict), (verdict.recording,), _found(verdict.findings, sites.places)
    return Page(
        about="check",
        story=story,
        headline=_headline(findings, "First finding"),
        facts=(
            _counted(len(verdict.steps), "step", " checked"),
            _counted(len(verdict.ranks), "rank"),
            (len(sites.rows), "sites"),
            (sum(math.isinf(one.size) for one in history.extremes.values()), "with NaN or infinity"),
        ),
        findings=findings,
        warnings=_found(verdict.warnings, sites.places),
        products=verdict.products,
        rules=sorted(verdict.rules, key=lambda rule: (_ANSWERS.index(rule.result), not rule.unknown)),
        settings=run_settings(recordings),
        order=sites.order,
        data={
            "kind": "check",
            **data_of(
                sites, history.whole, drawn=_DRAWN["check"], recordings=recordings,
                findings=(*verdict.findings, *verdict.warnings),
            ),
            "words": None,
            "by_rank": None,
            "sides": ["run"],
            "curves": _curves(sites, {"size": history.whole.of("size")}),
        },
    )  # fmt: skip


def _of_comparison(comparison: Comparison, history: DifferenceHistory) -> Page:
    sites = in_execution_order(
        SiteRow(
            place=key[:5], micro_step=key.micro_step, order=far.order, step=far.step, dtypes=far.dtypes,
            shapes=far.shapes, summaries=far.summaries,
        )
        for key in history.whole.sites
        for far in [history.farthest[key]]
    )  # fmt: skip
    story, recordings = story_of(comparison), (comparison.baseline, comparison.candidate)
    findings = _found(comparison.findings, sites.places)
    representation = _found(comparison.representation, sites.places)
    title = "First divergence" if findings else "The representation differs first at"
    headline = _headline(findings or representation, title)
    whole, differences = history.whole, comparison.differences
    return Page(
        about="comparison",
        story=story,
        headline=headline,
        facts=(
            _counted(len(comparison.steps), "step", " compared"),
            (len(differences), "sites"),
            (sum(row.num_identical_steps == row.num_steps for row in differences), "with the same bits throughout"),
            (comparison.words["above"], "above their floors"),
            (comparison.words["follows"], "that follow from the first divergence"),
        ),
        bits=_bits(comparison, sites.places),
        flow=_flow(headline.group.first, sites, history) if headline else (),
        findings=findings,
        representation=representation,
        alone=tuple(_alone(comparison)),
        settings=run_settings(recordings),
        order=sites.order,
        data={
            "kind": "comparison",
            **data_of(
                sites, whole, drawn=_DRAWN["comparison"], recordings=recordings,
                findings=(*comparison.findings, *comparison.representation),
            ),
            "words": {"names": SITE_WORDS, "values": packed(_words(history, sites.order))} if sites.rows else None,
            "by_rank": _by_rank(history, sites.order),
            "sides": ["baseline", "candidate"],
            "curves": _curves(sites, {name: whole.of(name) for name in _DRAWN["comparison"]}),
        },
    )  # fmt: skip


def _bits(comparison: Comparison, places: Mapping[Place, int]) -> Found | None:
    first, divergence = comparison.first_bit_difference, comparison.first_divergence
    if first is None or (divergence is not None and is_same_place(first, divergence)):
        return None
    return _found([first], places)[0]


def _counted(count: int, noun: str, rest: str = "") -> tuple[int, str]:
    return count, f"{noun}{'' if count == 1 else 's'}{rest}"


def _found(findings: Iterable[Finding], places: Mapping[Place, int]) -> tuple[Found, ...]:
    return tuple(Found(group=group, row=places.get(place_of(group.first))) for group in grouped(findings))


def _headline(found: Sequence[Found], title: str) -> Headline | None:
    return Headline(title=title, group=found[0].group, row=found[0].row) if found else None


def _curves(sites: ShownSites, drawn: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"row": row, "title": title_of(sites.rows[row])}
        | {name: numbers(values[sites.order[row]]) for name, values in drawn.items()}
        for row in curve_rows(sites.rows)
    ]


def _alone(comparison: Comparison) -> Iterator[tuple[str, ...]]:
    for run, missing in zip(("baseline", "candidate"), comparison.unaligned, strict=True):
        for one in missing:
            more = f", in {one.num_steps} steps" if one.num_steps > 1 else ""
            steps = f"from step {one.first_step}{more}"
            yield run, phase_text(one.phase, ""), label(one.path, one.slot), steps, one.why


def _flow(first: Finding, sites: ShownSites, history: DifferenceHistory) -> list[list[Node]]:
    if not history.whole.columns:
        return []
    column, order = history.whole.column_of(first.step), sites.order
    held = [history.whole.of(name)[:, column] for name in ("difference", "floor", "weight")]

    def measure(row: int) -> tuple[float, float, SiteWord | None]:
        difference, floor, weight = (float(values[order[row]]) for values in held)
        return difference, floor, None if math.isnan(weight) else SITE_WORDS[int(weight)]

    return dataflow(first, sites.rows, measure)


def _words(history: DifferenceHistory, order: Sequence[int]) -> NDArray[np.uint16]:
    """The word of each row in each column, as its place in `SITE_WORDS` counted from 1; 0 where there is none."""
    weights = history.whole.of("weight")[list(order)]
    return np.asarray(1 + np.nan_to_num(weights, nan=-1.0).astype(np.int64), dtype=np.uint16)


def _by_rank(history: DifferenceHistory, order: Sequence[int]) -> dict[str, Any] | None:
    """Ratios by rank, with the row and the rank of each line; None where there are none."""
    sites = history.by_rank.sites
    if not sites:
        return None
    keys = list(history.whole.sites)
    row_of = {keys[at]: row for row, at in enumerate(order)}
    held = [(row_of[key], rank, line) for (key, rank), line in sites.items()]
    return {
        "columns": history.by_rank.columns,
        "rows": [row for row, _, _ in held],
        "ranks": [rank for _, rank, _ in held],
        "ratio": packed(log_codes(history.by_rank.of("ratio")[[line for _, _, line in held]])),
    }


_PARTS = (
    "created", "command", "world_size", "mesh", "recipe", "forced_by", "settings", "versions", "environment", "source",
)  # fmt: skip
"""Parts of `run.json` that a page shows, in order."""


def run_settings(paths: Sequence[str]) -> list[Setting]:
    """The contents of `run.json` of one recording or of two; empty if one of them cannot be read."""
    try:
        contents = [open_recording(path).run for path in paths]
    except (RecordingError, OSError):
        return []
    runs = [dict(_flat({name: run[name] for name in _PARTS if name in run})) for run in contents]
    names = dict.fromkeys(name for run in runs for name in run)
    return [Setting(name=name, values=tuple(run.get(name, "") for run in runs)) for name in names]


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{name}.")
        elif isinstance(value, list) and all(isinstance(one, str) for one in value):
            yield f"{before}{name}", " ".join(value) if name == "command" else ", ".join(value) or "none"
        else:
            yield f"{before}{name}", value if isinstance(value, str) else json.dumps(value)
