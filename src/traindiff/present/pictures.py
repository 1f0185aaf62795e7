"""The main pictures of a report as PNG files, for where no browser is. They show what the script of a page draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.analyse.check import Verdict
from traindiff.analyse.compare import Comparison
from traindiff.analyse.findings import SITE_WORDS
from traindiff.analyse.merge.history import DifferenceHistory, RunHistory
from traindiff.errors import ConfigError, Problem
from traindiff.present.page import Page, page_of
from traindiff.present.page.dataflow import Node
from traindiff.present.page.writing import look

_DOTS_PER_INCH = 150
_MOST_INCHES = 9.0
"""Height of the heat map, however many sites there are."""

_BOXES = {
    "identical": ("good", "-"), "within": ("good", "--"), "follows": ("follows", "-"), "above": ("bad", "-"),
    "unknown": ("floor", ":"),
}  # fmt: skip
"""Color and line of a site in the dataflow, by its status."""

NewFigure = Callable[..., Any]
"""Makes a figure of so many inches."""


def check_matplotlib(where: str, *, asked_by: str) -> None:
    """Raise `ConfigError` if matplotlib is not installed, for which the option `where` of a command asks."""
    try:
        import matplotlib.figure  # noqa: F401  whether it is there
    except ModuleNotFoundError:
        fix = "Install it with: pip install 'traindiff[png]'."
        problem = Problem(where=where, what="needs matplotlib, which is not installed.", fix=fix)
        raise ConfigError(asked_by, [problem], consequence="nothing was written") from None


def check_directory(directory: Path) -> None:
    """Raise `ConfigError` if pictures cannot be drawn, or the directory cannot be made, before anything is computed."""
    check_matplotlib(f"--png {directory}", asked_by="report")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fix = "Give a directory that is there or can be made, and where you may write."
        problem = Problem(where=f"--png {directory}", what=f"cannot be made: {error.strerror}.", fix=fix)
        raise ConfigError("report", [problem], consequence="nothing was written") from None


def write_pictures(result: Comparison | Verdict, directory: Path) -> list[Path]:
    """Write the heat map, the curves and the dataflow around the first finding, as far as there are any.

    Args:
        result: Of `compare(..., history=True)` or `check(..., history=True)`.
        directory: Where to write them; made if it is not there.

    Returns:
        The files.

    Raises:
        ConfigError: The result has no history, matplotlib is not installed, or the directory cannot be made.
    """
    check_directory(directory)
    page, history = page_of(result), result.history
    written = []
    with drawing() as new:
        drawn = {
            "heat-map": _heat_map(new, page, history) if history is not None and history.whole.columns else None,
            "curves": _curves(new, page) if page.data["curves"] else None,
            "dataflow": _dataflow(new, page.flow, page.headline.group.where) if page.flow and page.headline else None,
        }
        for name, figure in drawn.items():
            if figure is not None:
                written.append(directory / f"{name}.png")
                figure.savefig(written[-1], dpi=_DOTS_PER_INCH, facecolor="white")
    return written


@contextmanager
def drawing(settings: Any = None) -> Iterator[NewFigure]:
    """Draw without a display, whatever else the process does with matplotlib.

    Args:
        settings: Further settings of matplotlib, by name.

    Yields:
        A function that makes a figure of a width and a height in inches.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    def new(width: float, height: float, *, layout: Any = "constrained") -> Any:
        figure = Figure(figsize=(width, height), layout=layout)
        FigureCanvasAgg(figure)
        return figure

    with rc_context(settings):
        yield new


def printable(text: str) -> str:
    """The text without characters that fonts do not have."""
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)


def _literal(text: str) -> str:
    """A text in which a dollar sign begins no formula."""
    return "\n".join(map(printable, text.split("\n"))).replace("$", r"\$")


def _heat_map(new: NewFigure, page: Page, history: DifferenceHistory | RunHistory) -> Any:
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap, Normalize
    from matplotlib.patches import Patch

    shown = look()["quantities"]["ratio" if page.about == "comparison" else "relative"]
    stops, (low, high) = look()["stops"]["light"][shown["stops"]], shown["range"]
    heat = LinearSegmentedColormap.from_list("heat", [((at - low) / (high - low), name) for at, name in stops])
    colors = heat.with_extremes(bad="#ffffff")
    values = np.clip(_logarithms(history), low, high)
    rows = page.data["rows"]
    figure = new(11, min(_MOST_INCHES, max(3.5, 1.6 + 0.012 * len(values))))
    axes = figure.subplots()
    extent = (-0.5, values.shape[1] - 0.5, len(values) - 0.5, -0.5)
    drawn = axes.imshow(
        values[list(page.order)],
        aspect="auto",
        interpolation="nearest",
        cmap=colors,
        norm=Normalize(low, high),
        extent=extent,
    )
    if isinstance(history, DifferenceHistory):
        words = np.floor(history.whole.of("weight"))
        follows = np.where(words == SITE_WORDS.index("follows"), 1.0, np.nan)
        flat = ListedColormap([look()["stops"]["light"]["follows"]]).with_extremes(bad="#ffffff00")
        axes.imshow(follows[list(page.order)], aspect="auto", interpolation="nearest", cmap=flat, extent=extent)
        if (follows == 1.0).any():
            patch = Patch(color=look()["stops"]["light"]["follows"], label="follows from the first divergence")
            axes.legend(handles=[patch], loc="upper right", fontsize=8)
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
    bar = figure.colorbar(drawn, ax=axes, label=shown["name"], ticks=range(low, high + 1), pad=0.01)
    bar.ax.set_yticklabels([f"1e{power}" if power else "1" for power in range(low, high + 1)])
    axes.set_title(_literal(page.title), fontsize=10, loc="left")
    return figure


def _logarithms(history: DifferenceHistory | RunHistory) -> NDArray[np.float32]:
    """Decimal logarithms of what the heat map shows; NaN where nothing was compared or recorded."""
    with np.errstate(divide="ignore", invalid="ignore"):
        if isinstance(history, DifferenceHistory):
            difference, floor = history.whole.of("difference"), history.whole.of("floor")
            ratios = np.where(difference == 0, 0.0, difference / floor)
            return np.asarray(np.log10(np.where(np.isinf(floor) & (difference != 0), np.nan, ratios)))
        sizes = np.abs(history.whole.of("size"))
        finite = np.where(np.isfinite(sizes) & (sizes > 0), sizes, np.nan)
        some = np.flatnonzero((~np.isnan(finite)).sum(axis=1))
        medians = np.ones((len(sizes), 1), np.float32)
        medians[some, 0] = np.nanmedian(finite[some], axis=1)
        return np.asarray(np.log10(np.where(sizes > 0, sizes, np.nan) / medians))


def _curves(new: NewFigure, page: Page) -> Any:
    curves = page.data["curves"]
    steps = [first for first, _ in page.data["columns"]]
    comparing = page.about == "comparison"
    color = look()["light"]
    figure = new(11, 2.4 * len(curves))
    grid = figure.subplots(len(curves), 2 if comparing else 1, squeeze=False, sharex=True)
    for curve, axes in zip(curves, grid, strict=True):
        axes[0].set_title(_literal(curve["title"]), fontsize=9, loc="left")
        if not comparing:
            axes[0].plot(steps, _array(curve["size"]), color=color["baseline"])
            _widen(axes[0])
            continue
        baseline, floor = _array(curve["baseline"]), _array(curve["floor"])
        axes[0].plot(steps, baseline, color=color["baseline"], linewidth=2.2, label="baseline")
        axes[0].plot(steps, _array(curve["candidate"]), "--", color=color["candidate"], label="candidate")
        _widen(axes[0])
        low, high = axes[0].get_ylim()
        band = np.abs(baseline) * floor
        axes[0].fill_between(steps, baseline - band, baseline + band, color=color["floor"], alpha=0.25, label="floor")
        axes[0].set_ylim(low, high)
        difference = _array(curve["difference"])
        difference[difference == 0] = np.nan
        axes[1].set_title("relative difference, and its floor", fontsize=9, loc="left")
        if np.nanmax(np.append(difference, 0.0)) > 0 or np.nanmax(np.append(floor, 0.0)) > 0:
            axes[1].set_yscale("log")
        axes[1].plot(steps, floor, ":", color=color["floor"], label="floor")
        axes[1].plot(steps, difference, color=color["candidate"], label="difference")
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
    """Let an axis of values span a part of their size at least, so that it does not zoom into their rounding."""
    low, high = axes.get_ylim()
    short = (look()["least_span"] * max(abs(low), abs(high)) - (high - low)) / 2
    if short > 0:
        axes.set_ylim(low - short, high + short)


def _array(values: Sequence[float | None]) -> NDArray[np.float64]:
    return np.array(values, np.float64)  # None is NaN


def _dataflow(new: NewFigure, flow: Sequence[Sequence[Node]], where: str) -> Any:
    tallest = max(map(len, flow))
    axes = new(2.9 * len(flow), 0.7 + 1.35 * tallest).subplots()
    axes.set_xlim(0, len(flow))
    axes.set_ylim(-tallest / 2, tallest / 2)
    axes.axis("off")
    axes.set_title(_literal(where), fontsize=10, loc="left")
    for number, column in enumerate(flow):
        if number:
            arrow = {"arrowstyle": "-|>", "color": look()["light"]["faint"]}
            axes.annotate("", xy=(number + 0.04, 0), xytext=(number - 0.04, 0), arrowprops=arrow)
        for at, node in enumerate(column):
            _box(axes, node, number + 0.5, (len(column) - 1) / 2 - at)
    return axes.figure


def _box(axes: Any, node: Node, x: float, y: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    color, (name, style) = look()["light"], _BOXES[node.style]
    axes.add_patch(
        FancyBboxPatch(
            (x - 0.42, y - 0.38), 0.84, 0.76, boxstyle="round,pad=0,rounding_size=0.04", edgecolor=color[name],
            linestyle=style, linewidth=2, facecolor=color["bad-soft" if node.first else "card"],
        )
    )  # fmt: skip
    site = _literal(_folded(node.site))
    axes.text(x - 0.38, y + 0.05, site, fontsize=8, color=color["text"], weight="bold", va="center", family="monospace")
    for text, up, shade in ((node.phase, 0.25, "faint"), (node.shape, -0.17, "faint"), (node.size, -0.29, name)):
        axes.text(x - 0.38, y + up, _literal(text), fontsize=8, color=color[shade], va="center", family="sans-serif")


def _folded(text: str) -> str:
    """A site in two lines, where it is too long for one; its beginning is left out where it is too long for two."""
    if len(text) <= 30:
        return text
    path, space, slot = text.rpartition(" ")
    path = path if len(path) <= 30 else f"...{path[-27:]}"
    return f"{path}{chr(10) if space else ''}{slot[-30:]}"
