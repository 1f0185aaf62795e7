"""A comparison as a page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from traindiff.analyse.check import Verdict
from traindiff.analyse.compare import Comparison, sentences
from traindiff.analyse.findings import Finding, also_text, before_text, grouped, phase_text, size_text, where_text
from traindiff.analyse.merge.history import DifferenceHistory, RunHistory
from traindiff.core.site import label
from traindiff.present.page import site_rows as curves
from traindiff.present.page.content import Alone, Found, Headline, Page, run_settings
from traindiff.present.page.dataflow import Node, dataflow
from traindiff.present.page.site_data import data_of, log_codes, packed
from traindiff.present.page.site_rows import Place, ShownSites, SiteRow, in_execution_order, place_of

_DRAWN_OF_CHECK = ("size", "largest", "zero", "nonfinite")


def page_of_check(verdict: Verdict, history: RunHistory) -> Page:
    """What the page of one run says.

    Args:
        verdict: The result of the check.
        history: The size of every site in every step.
    """
    sites = in_execution_order(
        SiteRow(
            place=key[:5], micro_step=key.micro_step, order=one.order, step=one.step, dtypes=(one.dtype,),
            shapes=(one.shape,), summaries=(one.summary,),
        )
        for key in history.whole.sites
        for one in [history.extremes[key]]
    )  # fmt: skip
    places = sites.places
    groups = grouped(verdict.findings)
    headline = None
    if groups:
        first = groups[0].first
        headline = Headline(
            label="First finding",
            where=where_text(first),
            message=first.message,
            further=tuple(filter(None, [also_text(groups[0].paths)])),
            row=places.get(place_of(first)),
            step=first.step,
        )
    word, _, rest = verdict.sentence().partition(":")
    return Page(
        about="check",
        recordings=(("recording", verdict.recording),),
        word=word,
        rest=f":{rest}",
        own="",
        headline=headline,
        facts=(
            (len(verdict.steps), "steps checked" if len(verdict.steps) != 1 else "step checked"),
            (len(verdict.ranks), "ranks" if len(verdict.ranks) != 1 else "rank"),
            (len(sites.rows), "sites"),
            (sum(math.isinf(one.size) for one in history.extremes.values()), "with NaN or infinity"),
        ),
        flow=(),
        findings=tuple(Found(group=group, row=places.get(place_of(group.first))) for group in groups),
        representation=(),
        alone=(),
        notes=verdict.notes,
        settings=run_settings([verdict.recording]),
        data=_data_of_check(verdict, history, sites),
    )


def _data_of_check(verdict: Verdict, history: RunHistory, sites: ShownSites) -> dict[str, Any]:
    whole, rows = history.whole, sites.rows
    recordings, findings = (verdict.recording,), verdict.findings
    return {
        "kind": "check",
        **data_of(sites, whole, drawn=_DRAWN_OF_CHECK, recordings=recordings, findings=findings),
        "by_rank": None,
        "sides": ["run"],
        "curves": [
            {"row": at, "title": curves.title_of(rows[at]), "size": curves.numbers(whole.of("size")[sites.order[at]])}
            for at in curves.curve_rows(rows)
        ],
    }


_DRAWN = ("difference", "floor", "baseline", "candidate")


def page_of_comparison(comparison: Comparison, history: DifferenceHistory) -> Page:
    """What the page of a comparison says.

    Args:
        comparison: The result.
        history: Every site's difference in every step.
    """
    sites = in_execution_order(
        SiteRow(
            place=key[:5], micro_step=key.micro_step, order=far.order, step=far.step, dtypes=far.dtypes,
            shapes=far.shapes, summaries=far.summaries,
        )
        for key in history.whole.sites
        for far in [history.farthest[key]]
    )  # fmt: skip
    places = sites.places
    first = comparison.first_divergence or (comparison.representation[0] if comparison.representation else None)
    word, _, rest = sentences.verdict(comparison).partition(" ")
    if word.endswith(":"):
        word, rest = word[:-1], f": {rest}"
    paths = (comparison.baseline, comparison.candidate)
    return Page(
        about="comparison",
        recordings=(("baseline", paths[0]), ("candidate", paths[1])),
        word=word,
        rest=rest,
        own=sentences.own_noise(comparison),
        headline=_headline(comparison, first, places),
        facts=_facts(comparison),
        flow=_flow(first, sites, history),
        findings=_found(comparison.findings, places),
        representation=_found(comparison.representation, places),
        alone=tuple(_alone(comparison)),
        notes=comparison.notes,
        settings=run_settings(paths),
        data=_data(comparison, history, sites),
    )


def _facts(comparison: Comparison) -> tuple[tuple[int, str], ...]:
    sites = comparison.differences
    return (
        (len(comparison.steps), "steps compared" if len(comparison.steps) != 1 else "step compared"),
        (len(sites), "sites"),
        (sum(row.num_identical_steps == row.num_steps for row in sites), "with the same bits throughout"),
        (sum(row.ratio > 1 for row in sites), "above their floors"),
    )


def _headline(comparison: Comparison, first: Finding | None, places: Mapping[Place, int]) -> Headline | None:
    if first is None:
        return None
    further = (size_text(first), before_text(first), sentences.also_at(comparison))
    return Headline(
        label="First divergence" if comparison.findings else "The representation differs first at",
        where=where_text(first),
        message=first.message,
        further=tuple(filter(None, further)),
        row=places.get(place_of(first)),
        step=first.step,
    )


def _found(findings: Iterable[Finding], places: Mapping[Place, int]) -> tuple[Found, ...]:
    return tuple(Found(group=group, row=places.get(place_of(group.first))) for group in grouped(findings))


def _alone(comparison: Comparison) -> Iterator[Alone]:
    for run, missing in zip(("baseline", "candidate"), comparison.unaligned, strict=True):
        for one in missing:
            more = f", in {one.num_steps} steps" if one.num_steps > 1 else ""
            yield Alone(
                run=run, phase=phase_text(one.phase, ""), site=label(one.path, one.slot),
                steps=f"from step {one.first_step}{more}", why=one.why,
            )  # fmt: skip


def _flow(first: Finding | None, sites: ShownSites, history: DifferenceHistory) -> list[list[Node]]:
    if first is None or not history.whole.columns:
        return []
    column = history.whole.column_of(first.step)
    differences, floors = history.whole.of("difference")[:, column], history.whole.of("floor")[:, column]
    order = sites.order
    return dataflow(first, sites.rows, lambda row: (float(differences[order[row]]), float(floors[order[row]])))


def _data(comparison: Comparison, history: DifferenceHistory, sites: ShownSites) -> dict[str, Any]:
    whole, rows = history.whole, sites.rows
    recordings = (comparison.baseline, comparison.candidate)
    findings = (*comparison.findings, *comparison.representation)
    return {
        "kind": "comparison",
        **data_of(sites, whole, drawn=_DRAWN, recordings=recordings, findings=findings),
        "by_rank": _by_rank(history, sites.order),
        "sides": ["baseline", "candidate"],
        "curves": [_curve(at, rows[at], whole.cells[sites.order[at]], whole.fields) for at in curves.curve_rows(rows)],
    }


def _curve(at: int, row: SiteRow, cells: np.ndarray[Any, Any], fields: Sequence[str]) -> dict[str, Any]:
    named = {name: curves.numbers(cells[:, fields.index(name)]) for name in _DRAWN}
    return {"row": at, "title": curves.title_of(row), **named}


def _by_rank(history: DifferenceHistory, order: Sequence[int]) -> dict[str, Any] | None:
    """Ratios by rank, with the row and the rank of each line; None where there are none."""
    sites = history.by_rank.sites
    if not sites:
        return None
    keys = list(history.whole.sites)
    row_of = {keys[at]: row for row, at in enumerate(order)}
    held = [[row_of[key], rank, line] for (key, rank), line in sites.items()]
    lines = [line for _, _, line in held]
    return {
        "columns": history.by_rank.columns,
        "rows": [row for row, _, _ in held],
        "ranks": [rank for _, rank, _ in held],
        "ratio": packed(log_codes(history.by_rank.of("ratio")[lines])),
    }
