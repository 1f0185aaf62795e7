"""Results in a notebook: a line, a summary in HTML, a page, tables for pandas and polars, and pictures."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from html import escape
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa

from traindiff.analyse.check import Verdict
from traindiff.analyse.compare import Comparison, Verification
from traindiff.analyse.findings import phase_text, where_text
from traindiff.analyse.merge.history import History
from traindiff.analyse.story import story_of
from traindiff.core.site import label, matches
from traindiff.errors import ConfigError, Problem
from traindiff.present.data.observations import Filter, rows
from traindiff.present.data.observations import table as observations_table
from traindiff.present.page import page_of, write
from traindiff.present.text.layout import exact_digits
from traindiff.storage import Recording

Result = Comparison | Verification | Verdict | Recording

TOP = 12
"""Rows of the tables of a summary."""

_GOOD, _BAD, _UNSURE = "#14753c", "#c2182b", "#9a6200"
_COLORS = {**dict.fromkeys(("identical", "equivalent", "healthy"), _GOOD), "diverged": _BAD, "unhealthy": _BAD}


def short(result: Result) -> str:
    """A result in one line, e.g. `<Comparison diverged at step 2, grad, fc.weight grad; 8 steps, 480 sites>`."""
    name = type(result).__name__
    if isinstance(result, Recording):
        return f"<{name} {result.path}: {_count(len(result.ranks), 'rank')} of {result.world_size}>"
    if isinstance(result, Verdict):
        first, counts = result.findings[:1], f"{_count(len(result.findings), 'finding')}"
        about = f"{_count(len(result.steps), 'step')}, {counts}, {_count(len(result.warnings), 'warning')}"
    else:
        comparison = result if isinstance(result, Comparison) else result.comparison
        first = comparison.findings[:1]
        about = f"{_count(len(comparison.steps), 'step')}, {_count(len(comparison.differences), 'site')}"
    where = f" at {where_text(first[0])}" if first else ""
    return f"<{name} {result.verdict}{where}; {about}>"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def summary(result: Result) -> str:
    """A result as a piece of HTML: the verdict, the first finding, and a table. It has no script and loads nothing."""
    parts = _of_recording(result) if isinstance(result, Recording) else _of_verdict(result)
    return f'<div class="traindiff" style="max-width: 960px">{"".join(parts)}</div>'


def _of_verdict(result: Comparison | Verification | Verdict) -> Iterator[str]:
    story = story_of(result)
    rest = story.sentence.removeprefix(story.word)
    color = _COLORS.get(story.word, _UNSURE)
    yield f'<p style="font-size: 1.15em"><b style="color: {color}">{escape(story.word)}</b>{escape(rest)}</p>'
    recordings = (f"{escape(role)} <code>{escape(path)}</code>" for role, path in story.recordings)
    yield f"<p>{' &middot; '.join(recordings)}</p>"
    for chapter in story.chapters:
        first = chapter.first
        yield f"<p><b>{escape(chapter.title)}: <code>{escape(first.where)}</code></b><br>"
        yield f"{escape(first.first.said)}"
        more = len(chapter.further)
        yield f"<br>({_count(more, 'further ' + chapter.noun)}.)</p>" if more else "</p>"
    comparison = result if isinstance(result, Comparison) else getattr(result, "comparison", None)
    if comparison is not None:
        above = sorted((row for row in comparison.differences if row.word == "above"), key=lambda row: row.order)
        cells = [
            (phase_text(row.phase, row.stage), label(row.path, row.slot), str(row.step),
             *(f"{size:.2g}" if math.isfinite(size) else "-" for size in (row.difference, row.floor, row.ratio)))
            for row in above[:TOP]
        ]  # fmt: skip
        yield _html_table(("phase", "site", "at step", "difference", "floor", "x floor"), cells, numbers=4)
        yield f"<p>{escape(story.counts)}</p>"
    if story.notes:
        notes = "".join(f"<li>{escape(note)}</li>" for note in story.notes)
        yield f"<details><summary>{_count(len(story.notes), 'note')}</summary><ul>{notes}</ul></details>"


def _of_recording(recording: Recording) -> Iterator[str]:
    losses: dict[str, dict[int, float]] = {}
    for row in rows(recording, Filter(phases=("loss",))):
        if row["count"] == 1 and row["mean"] is not None and not row["stage"]:
            losses.setdefault(label(row["site"], row["slot"]), {}).setdefault(row["step"], row["mean"])
    steps = sorted({step for values in losses.values() for step in values})
    observed = ", ".join(recording.run["settings"].get("observe", ())) or "nothing"
    yield f"<p><b>{escape(recording.path)}</b>: {_count(len(recording.ranks), 'rank')}, "
    yield f"recorded {escape(str(recording.run.get('created', '')))}; observed {escape(observed)}</p>"
    cells = [
        (name, str(len(values)), *(exact_digits(values[step], 7) for step in (min(values), max(values))))
        for name, values in list(losses.items())[:TOP]
    ]
    yield _html_table(("loss", "steps", "first", "last"), cells, numbers=3)
    if steps:
        yield f"<p>Losses of the steps {steps[0]} to {steps[-1]}.</p>"
    for rank in recording.ranks:
        if (status := recording.status(rank)).message:
            yield f"<p>{escape(status.message)}</p>"


def _html_table(names: Sequence[str], cells: Sequence[Sequence[str]], *, numbers: int) -> str:
    """A table whose last `numbers` columns are aligned to the right; empty without rows."""
    if not cells:
        return ""
    aligned = ["left"] * (len(names) - numbers) + ["right"] * numbers
    head = "".join(f'<th style="text-align: {to}">{escape(name)}</th>' for name, to in zip(names, aligned, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f'<td style="text-align: {to}">{escape(cell)}</td>' for cell, to in zip(row, aligned, strict=True))
        + "</tr>"
        for row in cells
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def page(result: Result) -> str:
    """The whole report as one page of HTML."""
    shown = result.comparison if isinstance(result, Verification) else result
    if isinstance(shown, Recording):
        from traindiff.analyse.check import check

        shown = check(shown.path, history=True)
    text = io.StringIO()
    write(page_of(shown), text)
    return text.getvalue()


def table(result: Result) -> pa.Table:
    """A result as a table: its sites, its findings, or its observations."""
    if isinstance(result, Recording):
        return observations_table(rows(result, Filter()))
    if isinstance(result, Verdict):
        found = [{"warning": False, **one.to_json()} for one in result.findings]
        found += [{"warning": True, **one.to_json()} for one in result.warnings]
        kept = [{name: value for name, value in one.items() if name != "evidence"} for one in found]
        return pa.Table.from_pylist(kept, schema=_FINDINGS)
    comparison = result if isinstance(result, Comparison) else result.comparison
    return pa.Table.from_pylist([row.to_json() for row in comparison.differences], schema=_SITES)


_SITES = pa.schema([
    ("phase", pa.utf8()), ("stage", pa.utf8()), ("site", pa.utf8()), ("slot", pa.utf8()), ("call", pa.int32()),
    ("word", pa.utf8()), ("step", pa.int64()), ("difference", pa.float64()), ("floor", pa.float64()),
    ("undisturbed_floor", pa.float64()), ("ratio", pa.float64()), ("first_other_bits", pa.int64()),
    ("num_steps", pa.int64()), ("num_identical_steps", pa.int64()),
])  # fmt: skip
_FINDINGS = pa.schema([
    ("warning", pa.bool_()), ("step", pa.int64()), ("micro_step", pa.int64()), ("evaluation", pa.int64()),
    ("rank", pa.int64()), ("phase", pa.utf8()), ("stage", pa.utf8()), ("site", pa.utf8()), ("slot", pa.utf8()),
    ("call", pa.int32()), ("kind", pa.utf8()), ("ratio", pa.float64()), ("difference", pa.float64()),
    ("floor", pa.float64()), ("message", pa.utf8()),
])  # fmt: skip


def pandas_table(result: Result) -> Any:
    """The table for pandas."""
    _needed("pandas", "to_pandas()")
    return table(result).to_pandas()


def polars_table(result: Result) -> Any:
    """The table for polars."""
    return _needed("polars", "to_polars()").from_arrow(table(result))


def _needed(name: str, asked_by: str) -> ModuleType:
    from importlib import import_module

    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        text = f"{asked_by} needs {name}, which is not installed. Install it with: pip install {name}"
        raise ModuleNotFoundError(text, name=name) from None


def figure(result: Result, site: str) -> Any:
    """A figure of one site over the steps."""
    from traindiff.present.pictures import check_matplotlib

    check_matplotlib(f"plot({site!r})", asked_by="plot")
    from matplotlib.figure import Figure

    comparison = result.comparison if isinstance(result, Verification) else result
    lines = _lines(comparison, site)
    both = isinstance(comparison, Comparison)
    drawn = Figure(figsize=(7, 5 if both else 3), layout="constrained")
    axes = drawn.subplots(2 if both else 1, 1, sharex=True, squeeze=False)[:, 0]
    for name, steps, values in lines["size"]:
        axes[0].plot(steps, values, label=name, marker="." if len(steps) < 40 else "", alpha=0.85)
    axes[0].set_ylabel("value or L2 norm")
    if both:
        for name, steps, values in lines["difference"]:
            positive = np.where(np.asarray(values) > 0, values, np.nan)
            axes[1].plot(steps, positive, label=name, ls="--" if name.startswith("floor") else "-", marker=".")
        axes[1].set_yscale("log")
        axes[1].set_ylabel("relative difference")
    axes[-1].set_xlabel("step")
    for one in axes:
        one.legend(fontsize="small")
    axes[0].set_title(site)
    return drawn


Line = tuple[str, Sequence[int], Sequence[float]]


def _lines(result: Comparison | Verdict | Recording, site: str) -> Mapping[str, list[Line]]:
    """Lines of a site by axis: each with its name, its steps and its values."""
    if isinstance(result, Recording):
        return {"size": _observed(result, site)}
    if result.history is None:
        name = "compare" if isinstance(result, Comparison) else "check"
        what, fix = "asks for the numbers of every step, which the result lacks.", f"Call {name}(..., history=True)."
        raise ConfigError(
            "plot", [Problem(where=f"plot({site!r})", what=what, fix=fix)], consequence="nothing was drawn"
        )
    whole: History[Any] = result.history.whole
    found = _chosen(site, {label(key.path, key.slot): key.path for key in whole.sites})
    fields = ("baseline", "candidate") if isinstance(result, Comparison) else ("size",)
    lines: dict[str, list[Line]] = {"size": [], "difference": []}
    steps = [first for first, _ in whole.columns]
    for key, line in whole.sites.items():
        name = label(key.path, key.slot)
        if name not in found:
            continue
        about = " ".join(filter(None, (name if len(found) > 1 else "", phase_text(key.phase, key.stage))))
        lines["size"] += [(f"{field} {about}".strip(), steps, whole.of(field)[line].tolist()) for field in fields]
        if isinstance(result, Comparison):
            lines["difference"] += [
                (f"{field} {about}", steps, whole.of(field)[line].tolist()) for field in ("difference", "floor")
            ]
    return lines


def _observed(recording: Recording, site: str) -> list[Line]:
    held: dict[tuple[str, str], dict[int, float]] = {}
    names: dict[str, str] = {}
    for row in rows(recording, Filter()):
        name = label(row["site"], row["slot"])
        names.setdefault(name, row["site"])
        if row["norm"] is not None and (matches(site, row["site"]) or site == name):
            single = row["count"] == 1 and row["mean"] is not None
            phase = phase_text(row["phase"], row["stage"])
            held.setdefault((name, phase), {}).setdefault(row["step"], row["mean"] if single else row["norm"])
    _chosen(site, names)
    return [(f"{name} {phase}", list(values), list(values.values())) for (name, phase), values in held.items()]


def _chosen(site: str, names: Mapping[str, str]) -> set[str]:
    """The names of the sites that are asked for.

    Args:
        site: A glob over paths, or a path and a slot.
        names: Path by name of each site.

    Raises:
        ConfigError: There is none.
    """
    found = {name for name, path in names.items() if name == site or matches(site, path)}
    if found:
        return found
    near = get_close_matches(site, names, n=3, cutoff=0.4)
    fix = f"Did you mean {' or '.join(map(repr, near))}?" if near else "See traindiff show."
    problem = Problem(where=f"plot({site!r})", what="names no site of this result.", fix=fix)
    raise ConfigError("plot", [problem], consequence="nothing was drawn")
