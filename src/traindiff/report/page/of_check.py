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
from traindiff.report.page.run_settings import run_settings
from traindiff.report.page.site_data import data_of
from traindiff.report.page.site_rows import ShownSites, SiteRow, in_execution_order, place_of

_DRAWN = ("size", "largest", "zero", "nonfinite")


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
            (len(sites.rows), "sites"),
            (sum(math.isinf(one.size) for one in history.extremes.values()), "with NaN or infinity"),
        ),
        flow=(),
        findings=tuple(Found(group=group, row=places.get(place_of(group.first))) for group in groups),
        representation=(),
        alone=(),
        notes=verdict.notes,
        settings=run_settings([verdict.recording]),
        data=_data(verdict, history, sites),
    )


def _data(verdict: Verdict, history: RunHistory, sites: ShownSites) -> dict[str, Any]:
    whole, rows = history.whole, sites.rows
    recordings, findings = (verdict.recording,), verdict.findings
    return {
        "kind": "check",
        **data_of(sites, whole, drawn=_DRAWN, recordings=recordings, findings=findings),
        "by_rank": None,
        "sides": ["run"],
        "curves": [
            {"row": at, "title": curves.title_of(rows[at]), "size": curves.numbers(whole.of("size")[sites.order[at]])}
            for at in curves.curve_rows(rows)
        ],
    }
