"""Pictures of how similar the directions of gradients are. matplotlib (extra `png`) is imported when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from traindiff.analyse.signs import DROP_PERCENT, START_PERCENT, Similarities
from traindiff.present.pictures import NewFigure, check_matplotlib, drawing, printable
from traindiff.storage.location import file_name

_LINE, _BROKEN, _LIMIT, _FAINT = "#1f5fa8", "#c0392b", "#8a8a8a", "#dddddd"
NO_NAMES: Mapping[str, str] = MappingProxyType({})
_SETTINGS = {"text.parse_math": False, "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
_NAMES = 64
"""A heat map names so many parameters one by one. Of more parameters it names every n-th."""


def draw(found: Similarities, directory: Path, names: Mapping[str, str] = NO_NAMES) -> list[Path]:
    """Draw a picture for each parameter, one for all parameters together, and a heat map.

    Args:
        found: The similarities.
        directory: Directory, which is created if it does not exist. Pictures are called `PARAMETER_similarities.png`,
            `summary_similarities.png` and `heat_map.png`. If a parameter's name is not a valid file name, it is
            encoded.
        names: Names of parameters, by canonical path, if they differ from the path.

    Returns:
        The pictures: parameters in their order, the summary, the heat map.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    check_matplotlib("drawing pictures", asked_by="pictures")
    directory.mkdir(parents=True, exist_ok=True)
    broken: dict[str | None, list[int]] = {}
    for one in found.broken:
        broken.setdefault(one.parameter, []).append(one.step)
    shares = {path: [None if one is None else one.share for one in row] for path, row in found.parameters.items()}
    rows: list[tuple[str | None, Sequence[float | None]]] = list(shares.items())
    rows.append((None, [one.share for one in found.summary]))
    drawn = []
    with drawing(_SETTINGS) as new:
        figure = new(7.6, 3.6, layout=None)  # a layout that is computed takes longer than the drawing
        for path, values in rows:
            called = "" if path is None else names.get(path, path)
            name = "summary" if path is None else file_name(called)
            if called == "summary":
                name = "%_summary"  # a parameter of that name
            figure.clear()
            title = f"All together ({_parameters(len(shares))}), weighted by their elements" if path is None else called
            _curve(figure, title, found.steps, values, broken.get(path, ()))
            drawn.append(directory / f"{name}_similarities.png")
            figure.savefig(drawn[-1], dpi=100)
        drawn.append(directory / "heat_map.png")
        _heat_map(new, found, broken, names).savefig(drawn[-1], dpi=120)
    return drawn


def _curve(
    figure: Any, title: str, steps: Sequence[int], values: Sequence[float | None], broken: Sequence[int]
) -> None:
    """Similarity over steps, with the limit of the first step, and the steps that break the rule."""
    axes = figure.add_axes((0.09, 0.13, 0.85, 0.74))
    heights = np.array(values, float)  # None is NaN
    at = dict(zip(steps, heights.tolist(), strict=True))
    limit = START_PERCENT / 100
    axes.axhline(limit, color=_LIMIT, linewidth=1, linestyle="--", zorder=1)
    axes.text(1.008, limit, f"{limit:.2f}", transform=axes.get_yaxis_transform(), va="center", color=_LIMIT)
    for step in broken:
        axes.axvline(step, color=_BROKEN, alpha=0.18, linewidth=5, zorder=0)
    axes.plot(steps, heights, color=_LINE, linewidth=1.4, marker="o" if len(steps) <= 60 else None, markersize=3.5)
    axes.plot(broken, [at[step] for step in broken], "o", color=_BROKEN, markersize=6, zorder=3)
    lowest = min(limit, float(np.nanmin(heights)) if np.isfinite(heights).any() else limit)
    axes.set_ylim(lowest - 0.12 * (1 - lowest) - 0.002, 1 + 0.06 * (1 - lowest))
    axes.set_xlim(steps[0] - 0.5, steps[-1] + 0.5)
    axes.set_xticks(_whole_ticks(steps))
    axes.grid(axis="y", color=_FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel("step")
    axes.set_ylabel("similarity of directions")
    figure.text(0.09, 0.955, _shortened(title, 90), va="top", fontsize=10)
    if broken:
        figure.text(0.94, 0.885, _broken_text(broken), va="bottom", ha="right", color=_BROKEN)


def _heat_map(
    new: NewFigure, found: Similarities, broken: Mapping[str | None, Sequence[int]], called: Mapping[str, str]
) -> Any:
    """All parameters over all steps, with a dot where the rule is broken."""
    names = list(found.parameters)
    rows = [[None if one is None else one.share for one in row] for row in found.parameters.values()]
    shares = np.array(rows, float).reshape(len(names), len(found.steps))  # None is NaN
    height = float(np.clip(1.6 + 0.17 * len(names), 3.2, 11))
    figure = new(11, height)
    axes = figure.add_subplot()
    axes.set_facecolor(_FAINT)
    lowest = float(np.nanmin(shares)) if np.isfinite(shares).any() else 0.9
    if shares.size:
        image = axes.imshow(
            shares, aspect="auto", interpolation="nearest", cmap="viridis", vmin=min(0.9, lowest), vmax=1,
        )  # fmt: skip
        bar = figure.colorbar(image, ax=axes, pad=0.01, fraction=0.03)
        bar.set_label(f"similarity of directions (white: {START_PERCENT / 100:.2f}, gray: not in both runs)")
        bar.ax.axhline(START_PERCENT / 100, color="white", linewidth=1.5)
    _mark_broken(axes, found.steps, names, broken)
    every = max(1, -(-len(names) // _NAMES))
    axes.set_yticks(
        range(0, len(names), every), [_shortened(called.get(name, name), 48) for name in names[::every]], fontsize=7
    )
    if every > 1:
        axes.set_ylabel(f"{len(names)} parameters, one of {every} with its name")
    ticks = range(0, len(found.steps), max(1, -(-len(found.steps) // 20)))
    axes.set_xticks(ticks, [str(found.steps[number]) for number in ticks])
    axes.set_xlabel("step")
    axes.set_title(_heat_map_title(names, broken), loc="left", fontsize=10, pad=14)
    return figure


def _mark_broken(
    axes: Any, steps: Sequence[int], names: Sequence[str], broken: Mapping[str | None, Sequence[int]]
) -> None:
    """Draw a dot on each cell that breaks the rule, and a triangle above each step with such a cell."""
    column = {step: number for number, step in enumerate(steps)}
    cells = [(column[step], row) for row, name in enumerate(names) for step in broken.get(name, ())]
    if not cells:
        return
    across, down = zip(*cells, strict=True)
    size = float(np.clip(550 / max(len(names), len(steps)), 5, 34))
    axes.scatter(across, down, s=size, color="white", edgecolors=_BROKEN, linewidths=min(0.9, size / 6), zorder=2)
    above = sorted(set(across))
    axes.scatter(
        above, [1.012] * len(above), marker="v", s=26, color=_BROKEN, transform=axes.get_xaxis_transform(),
        clip_on=False,
    )  # fmt: skip


def _heat_map_title(names: Sequence[str], broken: Mapping[str | None, Sequence[int]]) -> str:
    count = sum(name in broken for name in names)
    if not count:
        return f"{_parameters(len(names))}, none of which breaks the rule"
    start, drop = START_PERCENT / 100, DROP_PERCENT / 100
    rule = f"below {start:.2f} in the first step, or more than {drop:.2f} less than in the step before"
    return f"{count} of {_parameters(len(names))} break the rule (dots): {rule}"


def _parameters(count: int) -> str:
    return f"{count} parameter{'' if count == 1 else 's'}"


def _whole_ticks(steps: Sequence[int]) -> list[int]:
    """At most ten steps, evenly apart."""
    apart = max(1, -(-(steps[-1] - steps[0]) // 10))
    apart = next(nice for power in range(20) for nice in (10**power, 2 * 10**power, 5 * 10**power) if nice >= apart)
    return list(range(-(-steps[0] // apart) * apart, steps[-1] + 1, apart)) or [steps[0]]


def _broken_text(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:6])) + (f" and {len(steps) - 6} more" if len(steps) > 6 else "")
    return f"the rule is broken in step{'s' if len(steps) > 1 else ''} {shown}"


def _shortened(text: str, length: int) -> str:
    """A text of at most this length, without characters that fonts lack."""
    shown = printable(text)
    return shown if len(shown) <= length else f"{shown[: length // 2 - 1]}...{shown[-length // 2 + 2 :]}"
