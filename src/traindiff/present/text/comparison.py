"""A comparison in the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from traindiff.analyse.compare import Comparison, SiteDifference, sentences
from traindiff.analyse.compare.operator_localization import OperatorLocalization, OperatorRow, place_text
from traindiff.analyse.findings import Group, before_text, grouped, more_text, phase_text, size_text, where_text
from traindiff.core.site import label


def columns(*, left: Sequence[str], right: Sequence[str]) -> Table:
    """An empty table without borders."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


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
        console.print(Text(f"  {zoom.message}"), soft_wrap=True)
    if len(others) > top:
        more = more_text(len(others) - top, "finding", before="...").lstrip()
        console.print(Text(f"{more} taken apart."))


def zoom_text(zoom: OperatorLocalization) -> str:
    """Of what the operators are."""
    return f"step {zoom.step}, {zoom.phase} of {zoom.site}:"


def _print_rows(console: Console, zoom: OperatorLocalization) -> None:
    table = columns(left=("operator", "", "called from"), right=("inputs", "outputs"))
    for row in zoom.rows:
        cells = (
            row.shown.path,
            row.message,
            place_text(row.shown),
            _digits_of(row, row.given),
            _digits_of(row, row.made),
        )
        wrong = row.shown.path == zoom.operator
        table.add_row(*map(Text, cells), style="red" if wrong else None)
    console.print(table)


def _digits_of(row: OperatorRow, size: float) -> str:
    if row.baseline is None or row.candidate is None:
        return ""
    return f"{size:.2g}" if math.isfinite(size) else "-"


WORD_STYLES = {
    "identical": "bold green",
    "equivalent": "bold green",
    "diverged": "bold red",
    "misaligned": "bold yellow",
    "incomplete": "bold yellow",
}


def print_comparison(console: Console, comparison: Comparison, *, top: int) -> None:
    """Print a comparison: the verdict, the first divergence, the largest differences, what limits the verdict.

    The baseline's own noise comes first, where it was measured.

    Args:
        console: Where to print; decides about colors and width.
        comparison: What to print.
        top: Rows per table at most; 0 prints no tables.
    """
    if own := sentences.own_noise(comparison):
        console.print(Text(f"{own}\n"), soft_wrap=True)
    print_verdict(console, comparison)
    print_zooms(console, comparison, top=top)
    if top and (further := grouped(comparison.findings)[1:]):
        _print_findings(console, further, top=top)
    if top and any(row.difference > 0 for row in comparison.differences):
        _print_differences(console, comparison.differences, top=top)
    for number, line in enumerate(sentences.note_lines(comparison)):
        console.print(("" if number else "\n") + line, markup=False, highlight=False, soft_wrap=True)


def print_verdict(console: Console, comparison: Comparison) -> None:
    """Print the verdict and the first divergence."""
    word, colon, rest = sentences.verdict(comparison).partition(":")
    console.print(Text.assemble((word, WORD_STYLES[comparison.verdict]), colon, rest), soft_wrap=True)
    first = comparison.first_divergence
    if first is None:
        return
    console.print()
    console.print(Text.assemble(("First divergence: ", "bold"), (where_text(first), "bold cyan")), soft_wrap=True)
    console.print(Text(f"  {first.message}"), soft_wrap=True)
    if size := size_text(first):
        console.print(Text(f"  {size}", style="dim"), soft_wrap=True)
    if before := before_text(first):
        console.print(Text(f"  {before}", style="dim"), soft_wrap=True)
    if also := sentences.also_at(comparison):
        console.print(Text(f"  {also}"), soft_wrap=True)


def _print_findings(console: Console, groups: Sequence[Group], *, top: int) -> None:
    sites = sum(len(group.paths) for group in groups)
    shown = "" if len(groups) <= top else f", the first {top}"
    kinds = "" if len(groups) == sites else f", at {sites} sites"
    console.print(Text(f"\nFurther findings: {len(groups)}{kinds}{shown}", style="bold"))
    table = columns(left=("step", "phase", "site", "what"), right=())
    for group in groups[:top]:
        first = group.first
        phase = phase_text(first.phase, first.stage)
        table.add_row(*map(Text, (str(first.step), phase, group.site, first.message)))
    console.print(table)


def _print_differences(console: Console, differences: Sequence[SiteDifference], *, top: int) -> None:
    largest = sorted(differences, key=lambda row: row.ratio, reverse=True)[:top]
    shown = sorted((row for row in largest if row.difference > 0), key=lambda row: row.order)
    equal = sum(row.num_identical_steps == row.num_steps for row in differences)
    title = f"\nLargest differences, in execution order ({equal} of {len(differences)} sites are identical throughout)"
    console.print(Text(title, style="bold"), soft_wrap=True)
    table = columns(left=("phase", "site"), right=("at step", "difference", "floor", "x floor"))
    for row in shown:
        site = label(row.path, row.slot) + (f" call {row.call}" if row.call else "")
        cells = (phase_text(row.phase, row.stage), site, str(row.step))
        sizes = (_digits(row.difference), _digits(row.floor), _digits(row.ratio))
        table.add_row(*map(Text, (*cells, *sizes)), style="red" if row.ratio > 1 else None)
    console.print(table)


def _digits(value: float) -> str:
    return f"{value:.2g}" if math.isfinite(value) else "-"
