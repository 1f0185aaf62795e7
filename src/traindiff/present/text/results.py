"""Comparisons, checks, verifications and investigations in the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from rich.console import Console
from rich.text import Text

from traindiff.analyse.check import Rule, Verdict
from traindiff.analyse.compare import Comparison, SiteDifference, Verification
from traindiff.analyse.compare.investigation import Investigation, Matrix
from traindiff.analyse.compare.operator_localization import OperatorLocalization, OperatorRow, place_text
from traindiff.analyse.counting import as_people_count
from traindiff.analyse.findings import SiteWord, more_line, more_text, phase_text
from traindiff.analyse.products import PRODUCT_COLUMNS, ProductTable
from traindiff.analyse.story import (
    Chapter,
    Emphasis,
    PinnedStep,
    Section,
    Story,
    closing,
    conclusion,
    count_text,
    investigation_sections,
    of_comparison,
    opening,
    story_of,
)
from traindiff.core.site import label
from traindiff.present.text.layout import columns, print_line, print_table

_STYLES: Mapping[Emphasis, str] = {"title": "bold", "place": "bold cyan", "faint": "dim"}
WORD_STYLES = {
    "identical": "bold green", "equivalent": "bold green", "healthy": "bold green",
    "diverged": "bold red", "unhealthy": "bold red",
}  # fmt: skip
"""By the word of a verdict. All other words are yellow."""

STYLES_OF_SITES: Mapping[SiteWord, str] = {"above": "red", "follows": "magenta"}
"""By the word of a site; other words have no style."""


def print_section(
    console: Console, section: Section, *, word: str = "", table: Callable[[], None] = lambda: None
) -> None:
    """Print the lines of a section.

    Args:
        console: Where to print; decides about colors and width.
        section: The lines. Those that stand in place of a table are left out.
        word: The word of the verdict, which decides how a verdict is styled.
        table: Prints the table of the section: in place of these lines, or else at its end.
    """
    styles = {**_STYLES, "verdict": WORD_STYLES.get(word, "bold yellow")}
    missing = True
    for line in section.lines:
        if line[0][1] != "brief":
            print_line(console, Text.assemble(*((text, styles.get(kind, "")) for text, kind in line)))
        elif missing:
            table()
            missing = False
    if missing:
        table()


def print_verdict(console: Console, comparison: Comparison) -> None:
    """Print the verdict of a comparison, and its first divergence."""
    _print_opening(console, of_comparison(comparison))


def _print_opening(console: Console, story: Story, table: Callable[[Section], None] = lambda _: None) -> None:
    for number, section in enumerate(opening(story)):
        if number:
            console.print()
        print_section(console, section, word=story.word, table=partial(table, section))


def print_report(console: Console, result: Comparison | Verification | Verdict, *, top: int) -> None:
    """Print a result: the verdict, the first finding in full, further ones and the largest differences in tables.

    Of a verification, what was pinned down and what it took follow; what limits the verdict comes last.

    Args:
        console: Where to print; decides about colors and width.
        result: What to print.
        top: Rows per table at most; 0 prints no tables.
    """
    story = story_of(result)
    comparison = result if isinstance(result, Comparison) else None
    zoomed: Comparison | None = None
    if isinstance(result, Verification):
        comparison, zoomed = result.comparison, result.zoomed.comparison if result.zoomed else None

    def table(section: Section) -> None:
        about = section.about
        if isinstance(about, Chapter):
            if comparison is not None:
                print_zooms(console, comparison, top=top)
            _print_further(console, about, top=top)
        elif isinstance(about, PinnedStep):
            _print_pinned(console, about, top=top)
        elif about == "operators" and zoomed is not None:
            print_zooms(console, zoomed, top=top, further=False)

    _print_opening(console, story, table)
    if comparison is not None:
        _print_differences(console, comparison.differences, top=top)
    for section in closing(story):
        console.print()
        print_section(console, section, table=partial(table, section))


def _print_further(console: Console, chapter: Chapter, *, top: int) -> None:
    groups = chapter.further
    if not top or not groups:
        return
    sites = sum(len(group.paths) for group in groups)
    shown = "" if len(groups) <= top else f", the first {top}"
    several = "" if len(groups) == sites else f", at {sites} sites"
    console.print(Text(f"\nFurther {chapter.noun}s: {len(groups)}{several}{shown}", style="bold"))
    firsts = [(group, group.first) for group in groups[:top]]
    rows = [(str(one.step), phase_text(one.phase, one.stage), group.site, one.said) for group, one in firsts]
    print_table(console, rows, left=("step", "phase", "site", "what"))
    if others := [one.kind for _, one in firsts if one.kind != chapter.first.first.kind]:
        print_line(console, Text(f"  {more_line(others)}", style="dim"))


_REST: Mapping[SiteWord, str] = {
    "above": "more above their floors", "follows": "that follow", "within": "within their floors",
    "not judged": "not judged", "identical": "identical",
}  # fmt: skip


def _print_differences(console: Console, differences: Sequence[SiteDifference], *, top: int) -> None:
    """Print the sites above their floors, or the largest differences if there are none, and count the others."""
    largest = sorted(differences, key=lambda row: row.weight, reverse=True)[:top]
    above = [row for row in largest if row.word == "above"]
    shown = sorted(above or (row for row in largest if row.word != "identical"), key=lambda row: row.order)
    if not shown:
        return
    title = "Above their floors" if above else "Largest differences"
    console.print(Text(f"\n{title}, in execution order", style="bold"))
    rows = []
    for row in shown:
        site = label(row.path, row.slot) + (f" call {row.call}" if row.call else "")
        sizes = map(_digits, (row.difference, row.floor, row.ratio))
        cells = (phase_text(row.phase, row.stage), site, str(row.step), *sizes)
        rows.append(cells if above else (*cells, row.word))
    print_table(
        console,
        rows,
        left=("phase", "site"),
        right=("at step", "difference", "floor", "x floor"),
        last=() if above else ("",),
        styles=[STYLES_OF_SITES.get(row.word) for row in shown],
    )
    counts = {
        word: sum(row.word == word for row in differences) - sum(row.word == word for row in shown) for word in _REST
    }
    rest = ", ".join(f"{count} {_REST[word]}" for word, count in counts.items() if count)
    if rest:
        print_line(console, Text(f"and {rest}"))


def _digits(value: float) -> str:
    return f"{value:.2g}" if math.isfinite(value) else "-"


def _print_pinned(console: Console, pinned: PinnedStep, *, top: int) -> None:
    found = pinned.findings
    if not found:
        return
    if not top:
        print_line(console, Text(f"  {', '.join(f'{one.site} ({one.phase})' for one in found)}"))
        return
    rows = [(phase_text(one.phase, one.stage), one.site, one.said, f"{one.ratio:.3g}") for one in found[:top]]
    print_table(console, rows, left=("phase", "site", "what"), right=("x floor",))
    if len(found) > top:
        console.print(Text(f"... and {len(found) - top} more."))


def print_zooms(console: Console, comparison: Comparison, *, top: int, further: bool = True) -> None:
    """Print the walk through the operators of the first finding's module; with `further`, other findings' operators.

    See `print_report` for `top`.
    """
    if not comparison.zooms:
        return
    first, *others = comparison.zooms
    if top:
        _print_walk(console, first)
    if not further:
        return
    if same := [zoom for zoom in others if zoom.operator and zoom.operator == first.operator]:
        named = " and ".join(f"the {zoom.phase} of {zoom.site}" for zoom in same[:3])
        more = more_text(len(same) - 3, "site")
        print_line(console, Text(f"The same operator is the first on the way to {named}{more}."))
    others = [zoom for zoom in others if zoom not in same]
    for zoom in others[:top]:
        _print_zoom_title(console, zoom)
        print_line(console, Text(f"  {zoom.message}"))
    if len(others) > top:
        more = more_text(len(others) - top, "finding", before="...").lstrip()
        console.print(Text(f"{more} taken apart."))


def _print_zoom_title(console: Console, zoom: OperatorLocalization) -> None:
    title = f"\nOperators, step {zoom.step}, {zoom.phase} of {zoom.site}:"
    print_line(console, Text(title, style="bold"))


def _print_walk(console: Console, zoom: OperatorLocalization) -> None:
    _print_zoom_title(console, zoom)
    table = columns(left=("operator", "", "called from"), right=("inputs", "outputs"))
    for row in zoom.rows:
        sizes = (_size_in(row, row.given), _size_in(row, row.made))
        cells = (row.shown.path, row.message, place_text(row.shown), *sizes)
        table.add_row(*map(Text, cells), style="red" if row.shown.path == zoom.operator else None)
    console.print(table)


def _size_in(row: OperatorRow, size: float) -> str:
    return "" if row.baseline is None or row.candidate is None else _digits(size)


def print_products(console: Console, products: ProductTable) -> None:
    """Print how exact matrix products and convolutions are, by operator and line."""
    print_line(console, Text("\nMatrix products and convolutions", style="bold"))
    left, numeric, last = PRODUCT_COLUMNS[:4], PRODUCT_COLUMNS[4:-1], PRODUCT_COLUMNS[-1]
    table = columns(left=left, right=numeric)
    table.add_column(last, overflow="fold")
    for row in products:
        table.add_row(*map(Text, row.cells))
    console.print(table)


def print_investigation(console: Console, investigation: Investigation, *, top: int) -> None:
    """Print what is run, the stages with their conclusions, and the conclusion of all; see `print_conclusion`."""
    for section in investigation_sections(investigation)[:-1]:
        print_section(console, section)
        console.print()
    print_conclusion(console, investigation, top=top)


def print_conclusion(console: Console, investigation: Investigation, *, top: int) -> None:
    """Print the walk through the operators, the verdict, and what it took; see `print_report` for `top`."""
    deciding = investigation.deciding
    if deciding is not None and deciding.zoomed is not None and top:
        print_zooms(console, deciding.zoomed.comparison, top=top)
        console.print()
    print_section(console, conclusion(investigation), word=investigation.verdict)


def print_matrix(console: Console, matrix: Matrix) -> None:
    """Print a row for each combination, and how many have which verdict."""
    print_line(console, Text(f"{matrix.recipe}; a report of each combination is below {matrix.output}"))
    console.print()
    table = columns(left=("combination", "verdict", "first divergence, or why it was not run"), right=("time",))
    for row in matrix.rows:
        time = "kept" if row.kept else f"{row.seconds:.1f} s" if row.seconds else ""
        table.add_row(*map(Text, (row.name, row.verdict, as_people_count(row.message), time)))
    console.print(table)
    console.print()
    print_line(console, Text(count_text(matrix)))


def print_rules(console: Console, rules: Iterable[type[Rule]]) -> None:
    """Print each rule's name, whether it warns, what it finds, and its limits as a configuration file sets them."""
    table = columns(left=("rule", "", "what it finds", "limits"))
    for rule in rules:
        limits = "\n".join(f"{name} = {limit.default:g}" for name, limit in rule.limits.items())
        table.add_row(*map(Text, (rule.name, "warns" if rule.warns else "", rule.finds, limits)))
    console.print(table)
