"""A check of one run as a page."""

from __future__ import annotations

import math
from typing import Any

from traindiff.findings.groups import grouped
from traindiff.findings.sentences import also_text, where_text
from traindiff.health import Verdict
from traindiff.health.history import RunHistory
from traindiff.report.page import curves
from traindiff.report.page.content import Found, Headline, Page
from traindiff.report.page.encoding import log_codes, packed
from traindiff.report.page.histograms import histograms
from traindiff.report.page.run_settings import run_settings
from traindiff.report.page.site_rows import (
    NUMBERS,
    PROFILES,
    SiteRow,
    as_columns,
    ascending,
    finding_of,
    numbers_of,
    place_of,
    rows_by_place,
)

_DRAWN = ("size", "largest", "zero", "nonfinite")


def page_of_check(verdict: Verdict, history: RunHistory) -> Page:
    """What the page of one run says.

    Args:
        verdict: The result of the check.
        history: The size of every site in every step.
    """
    keys = list(history.whole.sites)
    unsorted = [
        SiteRow(
            place=key[:5], micro_step=key.micro_step, order=one.order, step=one.step, dtypes=(one.dtype,),
            shapes=(one.shape,),
        )
        for key in keys
        for one in [history.extremes[key]]
    ]  # fmt: skip
    order = ascending(unsorted)
    rows = [unsorted[at] for at in order]
    places = rows_by_place(rows)
    groups = grouped(verdict.findings)
    headline = None
    if groups:
        first = groups[0].first
        headline = Headline(
            label="First finding",
            where=where_text(first),
            says=first.says,
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
            (len(rows), "sites"),
            (sum(math.isinf(one.size) for one in history.extremes.values()), "with NaN or infinity"),
        ),
        flow=(),
        findings=tuple(Found(group=group, row=places.get(place_of(group.first))) for group in groups),
        representation=(),
        alone=(),
        notes=verdict.notes,
        settings=run_settings([verdict.recording]),
        data=_data(verdict, history, rows, order, places),
    )


def _data(
    verdict: Verdict, history: RunHistory, rows: list[SiteRow], order: list[int], places: dict[Any, int]
) -> dict[str, Any]:
    whole = history.whole
    keys = list(whole.sites)
    numbers, profiles = numbers_of([(history.extremes[keys[at]].summary,) for at in order])
    return {
        "kind": "check",
        "columns": whole.columns,
        "rows": as_columns(rows),
        "cells": {name: packed(log_codes(whole.of(name)[order])) for name in _DRAWN} if rows else {},
        "by_rank": None,
        "sides": ["run"],
        "numbers": {"names": NUMBERS, "values": packed(numbers)} if rows else None,
        "profiles": {"names": PROFILES, "values": packed(profiles)} if rows else None,
        "curves": [
            {"row": at, "title": curves.title_of(rows[at]), "size": curves.numbers(whole.of("size")[order[at]])}
            for at in curves.curve_rows(rows)
        ],
        "histograms": histograms((verdict.recording,), rows),
        "findings": [finding_of(one, rows=places) for one in verdict.findings],
    }
