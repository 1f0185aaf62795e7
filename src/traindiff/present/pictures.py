"""The main pictures of a report as PNG files, for where no browser is."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.analyse.check import Verdict
from traindiff.analyse.compare import Comparison
from traindiff.analyse.merge.history import NOT_JUDGED, DifferenceHistory, RunHistory
from traindiff.errors import ConfigError, Problem
from traindiff.present.page import Page, page_of
from traindiff.present.page.dataflow import Node

DOTS_PER_INCH = 150

LEAST_SPAN = 1e-3
"""Of an axis of values, in units of their size; what is smaller is for the plot of differences (as in curves.js)."""

MOST_INCHES = 9.0
"""Height of the heat map, however many sites there are."""

_COLOURS = {"identical": "#14753c", "agrees": "#14753c", "differs": "#c2182b", "unknown": "#8a94a3"}
_STYLES = {"identical": "-", "agrees": "--", "differs": "-", "unknown": ":"}
_BASELINE, _CANDIDATE, _FLOOR = "#1f6fd1", "#d9580b", "#8a94a3"
_RATIO_STOPS = ((-3, "#e3eaf2"), (-0.001, "#6f9fd0"), (0, "#ffd23f"), (1, "#f58220"), (2.5, "#d01c3a"), (4, "#7a0f4f"))
_AROUND_STOPS = ((-3, "#1f5fa8"), (-0.3, "#cfe0f0"), (0, "#f0f2f5"), (0.3, "#fbe3c8"), (1.5, "#e8672a"), (3, "#9c1147"))


def check_directory(directory: Path) -> None:
    """Make sure that pictures can be drawn and written, before what they show is computed.

    Args:
        directory: Where to; made if it is not there.

    Raises:
        ConfigError: matplotlib is not installed, or the directory cannot be made.
    """
    where = f"--png {directory}"
    try:
        import matplotlib.figure  # noqa: F401  whether it is there
    except ModuleNotFoundError:
        fix = "Install it with: pip install 'traindiff[png]'"
        problem = Problem(where=where, what="needs matplotlib, which is not installed.", fix=fix)
        raise ConfigError("report", [problem], consequence="nothing was written") from None
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fix = "Give a directory that is there or can be made, and where you may write."
        problem = Problem(where=where, what=f"cannot be made: {error.strerror}.", fix=fix)
        raise ConfigError("report", [problem], consequence="nothing was written") from None


def write_pictures(result: Comparison | Verdict, directory: Path) -> list[Path]:
    """Write the heat map, the curves and the dataflow around the first finding, as far as there are any.

    Args:
        result: Of `compare(..., history=True)` or `check(..., history=True)`.
        directory: Where to; made if it is not there.

    Returns:
        The files.

    Raises:
        ConfigError: The result has no history, matplotlib is not installed, or the directory cannot be made.
    """
    check_directory(directory)
    page = page_of(result)
    history = result.history
    figures: dict[str, Any] = {}
    if history is not None and history.whole.columns:
        figures["heat-map"] = _heat_map(page, history)
    if page.data["curves"]:
        figures["curves"] = _curves(page)
    if page.flow:
        figures["dataflow"] = _dataflow(page.flow, page.headline.where if page.headline else "")
    written = []
    for name, figure in figures.items():
        path = directory / f"{name}.png"
        figure.savefig(path, dpi=DOTS_PER_INCH, facecolor="white")
        written.append(path)
    return written


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _literal(text: str) -> str:
    """Text in which a dollar sign begins no formula, and without characters that fonts lack."""
    return re.sub(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", text).replace("$", r"\$")


def _heat_map(page: Page, history: DifferenceHistory | RunHistory) -> Any:
    from matplotlib.colors import LinearSegmentedColormap, Normalize

    comparing = isinstance(history, DifferenceHistory)
    stops, low, high = (_RATIO_STOPS, -3, 4) if comparing else (_AROUND_STOPS, -3, 3)
    heat = LinearSegmentedColormap.from_list("heat", [((at - low) / (high - low), name) for at, name in stops])
    colors = heat.with_extremes(bad="#ffffff")
    values = np.clip(_logarithms(history), low, high)
    rows = page.data["rows"]
    order = _order(history, rows)
    figure = _figure(11, min(MOST_INCHES, max(3.5, 1.6 + 0.012 * len(values))))
    axes = figure.subplots()
    extent = (-0.5, values.shape[1] - 0.5, len(values) - 0.5, -0.5)
    drawn = axes.imshow(
        values[order], aspect="auto", interpolation="nearest", cmap=colors, norm=Normalize(low, high), extent=extent
    )
    places = np.unique(np.linspace(0, values.shape[1] - 1, min(12, values.shape[1])).astype(int))
    axes.set_xticks(places, [str(history.whole.columns[at][0]) for at in places])
    axes.set_xlabel("step")
    begins = [at for at, phase in enumerate(rows["phase"]) if not at or phase != rows["phase"][at - 1]]
    apart = 0.03 * len(values)  # a label's height
    named = [at for number, at in enumerate(begins) if not number or at - begins[number - 1] > apart]
    axes.set_yticks(named, [rows["phase"][at] for at in named])
    for at in begins[1:]:
        axes.axhline(at - 0.5, color="#ffffff", linewidth=0.8)
    if page.headline is not None and page.headline.row is not None:
        column = history.whole.column_of(page.headline.step)
        axes.plot([column], [page.headline.row], "o", markersize=11, markerfacecolor="none", markeredgecolor="black")
    name = "difference over floor" if comparing else "L2 norm over its median at the site"
    bar = figure.colorbar(drawn, ax=axes, label=name, ticks=range(low, high + 1), pad=0.01)
    bar.ax.set_yticklabels([f"1e{power}" if power else "1" for power in range(low, high + 1)])
    axes.set_title(_literal(page.title), fontsize=10, loc="left")
    return figure


def _logarithms(history: DifferenceHistory | RunHistory) -> NDArray[np.float32]:
    """Decimal logarithms of what the heat map shows; NaN where nothing was compared or recorded."""
    with np.errstate(divide="ignore", invalid="ignore"):
        if isinstance(history, DifferenceHistory):
            ratios = history.whole.of("ratio")
            return np.asarray(np.log10(np.where(ratios == np.float32(NOT_JUDGED), np.nan, ratios)))
        sizes = np.abs(history.whole.of("size"))
        finite = np.where(np.isfinite(sizes) & (sizes > 0), sizes, np.nan)
        some = np.flatnonzero((~np.isnan(finite)).sum(axis=1))
        medians = np.ones((len(sizes), 1), np.float32)
        medians[some, 0] = np.nanmedian(finite[some], axis=1)
        return np.asarray(np.log10(np.where(sizes > 0, sizes, np.nan) / medians))


def _order(history: DifferenceHistory | RunHistory, rows: dict[str, list[Any]]) -> list[int]:
    """Rows of the history in the order of the page."""
    from traindiff.core.site import ROOT

    place = {
        (key.phase, key.stage, key.path or ROOT, key.slot, key.call, key.micro_step): at
        for key, at in history.whole.sites.items()
    }
    names = zip(*(rows[name] for name in ("phase", "stage", "path", "slot", "call", "micro")), strict=True)
    return [place[one] for one in names]


def _curves(page: Page) -> Any:
    curves = page.data["curves"]
    steps = [first for first, _ in page.data["columns"]]
    comparing = page.about == "comparison"
    figure = _figure(11, 2.4 * len(curves))
    grid = figure.subplots(len(curves), 2 if comparing else 1, squeeze=False, sharex=True)
    for curve, axes in zip(curves, grid, strict=True):
        axes[0].set_title(_literal(curve["title"]), fontsize=9, loc="left")
        if not comparing:
            axes[0].plot(steps, _array(curve["size"]), color=_BASELINE)
            _widen(axes[0])
            continue
        baseline, floor = _array(curve["baseline"]), _array(curve["floor"])
        axes[0].plot(steps, baseline, color=_BASELINE, linewidth=2.2, label="baseline")
        axes[0].plot(steps, _array(curve["candidate"]), "--", color=_CANDIDATE, label="candidate")
        _widen(axes[0])
        low, high = axes[0].get_ylim()
        band = np.abs(baseline) * floor
        axes[0].fill_between(steps, baseline - band, baseline + band, color=_FLOOR, alpha=0.25, label="floor")
        axes[0].set_ylim(low, high)
        difference = _array(curve["difference"])
        difference[difference == 0] = np.nan
        axes[1].set_title("relative difference, and its floor", fontsize=9, loc="left")
        if np.nanmax(np.append(difference, 0.0)) > 0 or np.nanmax(np.append(floor, 0.0)) > 0:
            axes[1].set_yscale("log")
        axes[1].plot(steps, floor, ":", color=_FLOOR, label="floor")
        axes[1].plot(steps, difference, color=_CANDIDATE, label="difference")
    for axes in grid[:, 0]:
        axes.ticklabel_format(axis="y", useOffset=False)
    for axes in grid.flat:
        axes.grid(alpha=0.25)
        axes.tick_params(labelsize=8)
    if comparing:
        grid[0][0].legend(fontsize=8, frameon=False)
    for axes in grid[-1]:
        axes.set_xlabel("step", fontsize=8)
    return figure


def _widen(axes: Any) -> None:
    """Let an axis of values span a thousandth of their size at least, so that it does not zoom into their rounding."""
    low, high = axes.get_ylim()
    short = (LEAST_SPAN * max(abs(low), abs(high)) - (high - low)) / 2
    if short > 0:
        axes.set_ylim(low - short, high + short)


def _array(values: Sequence[float | None]) -> NDArray[np.float64]:
    return np.array([math.nan if value is None else value for value in values], dtype=np.float64)


def _dataflow(flow: Sequence[Sequence[Node]], where: str) -> Any:
    tallest = max(map(len, flow))
    figure = _figure(2.9 * len(flow), 0.7 + 1.35 * tallest)
    axes = figure.subplots()
    axes.set_xlim(0, len(flow))
    axes.set_ylim(-tallest / 2, tallest / 2)
    axes.axis("off")
    axes.set_title(_literal(where), fontsize=10, loc="left")
    for number, column in enumerate(flow):
        if number:
            axes.annotate(
                "",
                xy=(number + 0.04, 0),
                xytext=(number - 0.04, 0),
                arrowprops={"arrowstyle": "-|>", "color": "#5a6675"},
            )
        for at, node in enumerate(column):
            _box(axes, node, number + 0.5, (len(column) - 1) / 2 - at)
    return figure


def _box(axes: Any, node: Node, x: float, y: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    color = _COLOURS[node.status]
    axes.add_patch(
        FancyBboxPatch(
            (x - 0.42, y - 0.38), 0.84, 0.76, boxstyle="round,pad=0,rounding_size=0.04", edgecolor=color,
            linestyle=_STYLES[node.status], linewidth=2, facecolor="#fdeaec" if node.first else "#ffffff",
        )
    )  # fmt: skip
    lines = ((node.phase, 0.25, "#5a6675", "normal"), (_folded(node.site), 0.05, "#17202b", "bold"),
             (node.shape, -0.17, "#5a6675", "normal"), (node.size, -0.29, color, "normal"))  # fmt: skip
    for text, up, shade, weight in lines:
        axes.text(
            x - 0.38, y + up, _literal(text), fontsize=8, color=shade, weight=weight, va="center",
            family="monospace" if weight == "bold" else "sans-serif",
        )  # fmt: skip


def _folded(text: str) -> str:
    """A site in two lines, where it is too long for one; its beginning is left out where it is too long for two."""
    if len(text) <= 30:
        return text
    path, space, slot = text.rpartition(" ")
    path = path if len(path) <= 30 else f"...{path[-27:]}"
    return f"{path}{chr(10) if space else ''}{slot[-30:]}"
