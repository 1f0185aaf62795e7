"""The operators inside a module whose numbers differ, in the terminal."""

from __future__ import annotations

import math

from rich.console import Console
from rich.text import Text

from traindiff.comparison import Comparison
from traindiff.comparison.operator_sentences import place_text
from traindiff.comparison.zoom import OperatorRow, Zoom
from traindiff.findings.sentences import more_text
from traindiff.report.columns import columns


def print_zooms(console: Console, comparison: Comparison, *, top: int, further: bool = True) -> None:
    """Print the walk through the operators of the first finding's module; of further findings, what was found there.

    Args:
        console: Where to print.
        comparison: What to print.
        top: Rows per table at most; 0 prints no tables.
        further: Also print what was found for further findings.
    """
    if not comparison.zooms:
        return
    first, *others = comparison.zooms
    if top:
        console.print(Text(f"\nOperators, {zoom_text(first)}", style="bold"), soft_wrap=True)
        _print_rows(console, first)
    if not further:
        return
    if same := [zoom for zoom in others if zoom.operator and zoom.operator == first.operator]:
        named = " and ".join(f"the {zoom.phase} of {zoom.site}" for zoom in same[:3])
        more = more_text(len(same) - 3, "site")
        console.print(Text(f"The same operator is the first on the way to {named}{more}."), soft_wrap=True)
    others = [zoom for zoom in others if zoom not in same]
    for zoom in others[:top]:
        console.print(Text(f"\nOperators, {zoom_text(zoom)}", style="bold"), soft_wrap=True)
        console.print(Text(f"  {zoom.says}"), soft_wrap=True)
    if len(others) > top:
        more = more_text(len(others) - top, "finding", before="...").lstrip()
        console.print(Text(f"{more} taken apart."))


def zoom_text(zoom: Zoom) -> str:
    """Of what the operators are."""
    return f"step {zoom.step}, {zoom.phase} of {zoom.site}:"


def _print_rows(console: Console, zoom: Zoom) -> None:
    table = columns(left=("operator", "", "called from"), right=("inputs", "outputs"))
    for row in zoom.rows:
        cells = (row.shown.path, row.says, place_text(row.shown), _digits(row, row.given), _digits(row, row.made))
        wrong = row.shown.path == zoom.operator
        table.add_row(*map(Text, cells), style="red" if wrong else None)
    console.print(table)


def _digits(row: OperatorRow, size: float) -> str:
    if row.baseline is None or row.candidate is None:
        return ""
    return f"{size:.2g}" if math.isfinite(size) else "-"
