"""A verification in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from traindiff.analyse.compare import Pinned, Verification
from traindiff.analyse.compare.investigation import Investigation, Matrix, Stage
from traindiff.analyse.compare.verification import (
    Sides,
    beside_the_comparison,
    cost,
    pinned_heading,
    pinned_limits,
    what_is_run,
    zoomed_lines,
)
from traindiff.analyse.findings import phase_text
from traindiff.present.text.comparison import WORD_STYLES, columns, print_comparison, print_zooms


def print_matrix(console: Console, matrix: Matrix) -> None:
    """Print a row for each combination, and how many have which verdict.

    Args:
        console: Where to print.
        matrix: What to print.
    """
    console.print(Text(f"{matrix.recipe}; a report of each combination is below {matrix.output}"), soft_wrap=True)
    console.print()
    table = columns(left=("combination", "verdict", "first divergence, or why it was not run"), right=("time",))
    for row in matrix.rows:
        time = "kept" if row.kept else f"{row.seconds:.1f} s" if row.seconds else ""
        table.add_row(*map(Text, (row.name, row.verdict, row.message, time)))
    console.print(table)
    words = dict.fromkeys(row.verdict for row in matrix.rows)
    counts = [f"{sum(row.verdict == word for row in matrix.rows)} {word}" for word in words]
    console.print()
    console.print(
        Text(f"{len(matrix.rows)} combination{'' if len(matrix.rows) == 1 else 's'}: {', '.join(counts)}."),
        soft_wrap=True,
    )


def print_investigation(console: Console, investigation: Investigation, *, top: int) -> None:
    """Print the story: what was asked, what was found, the walk through the operators, the verdict.

    Args:
        console: Where to print; decides about colors and width.
        investigation: What to print.
        top: Rows per table at most; 0 prints no tables.
    """
    print_heading(console, investigation.sides, investigation.output)
    for number, stage in enumerate(investigation.stages, start=1):
        print_stage(console, number, stage)
    print_conclusion(console, investigation, top=top)


def print_heading(console: Console, sides: Sides, output: str) -> None:
    """Print what is run."""
    for line in what_is_run(sides, output):
        console.print(Text(line), soft_wrap=True)
    console.print()


def print_stage(console: Console, number: int, stage: Stage) -> None:
    """Print one stage: its question and its conclusion."""
    console.print(Text(f"{number}. {stage.asks}", style="bold"), soft_wrap=True)
    console.print(Text(f"   {stage.message}\n"), soft_wrap=True)


def print_conclusion(console: Console, investigation: Investigation, *, top: int) -> None:
    """Print the walk through the operators, the verdict, and what it took."""
    deciding = investigation.deciding
    if deciding is not None and deciding.zoomed is not None and top:
        print_zooms(console, deciding.zoomed.comparison, top=top)
        console.print()
    word = investigation.verdict
    console.print(Text.assemble("Verdict: ", (word, WORD_STYLES[word])), soft_wrap=True)
    console.print(Text(f"{investigation.cost} Files: {investigation.output}", style="dim"), soft_wrap=True)


def print_verification(console: Console, verification: Verification, *, top: int) -> None:
    """Print the comparison of the free runs, what was pinned down, and what it took.

    Args:
        console: Where to print; decides about colors and width.
        verification: What to print.
        top: Rows per table at most; 0 prints no tables.
    """
    for line in what_is_run(verification.sides, verification.output):
        console.print(Text(line), soft_wrap=True)
    console.print()
    print_comparison(console, verification.comparison, top=top)
    for line in beside_the_comparison(verification):
        console.print(Text(line), soft_wrap=True)
    for pinned in verification.pinned:
        _print_pinned(console, pinned, top=top)
        for note in pinned_limits(verification, pinned):
            console.print(Text(note), soft_wrap=True)
    _print_zoomed(console, verification, top=top)
    console.print(Text(f"\n{cost(verification)}", style="dim"), soft_wrap=True)


def _print_zoomed(console: Console, verification: Verification, *, top: int) -> None:
    for line in zoomed_lines(verification):
        console.print(Text(line), soft_wrap=True)
    if verification.zoomed:
        print_zooms(console, verification.zoomed.comparison, top=top, further=False)


def _print_pinned(console: Console, pinned: Pinned, *, top: int) -> None:
    console.print(Text(f"\n{pinned_heading(pinned)}", style="bold"), soft_wrap=True)
    found = pinned.comparison.findings
    if not found:
        return
    if not top:
        console.print(Text(f"  {', '.join(f'{one.site} ({one.phase})' for one in found)}"), soft_wrap=True)
        return
    table = columns(left=("phase", "site", "what"), right=("x floor",))
    for one in found[:top]:
        phase = phase_text(one.phase, one.stage)
        table.add_row(*map(Text, (phase, one.site, one.message, f"{one.ratio:.3g}")))
    console.print(table)
    if len(found) > top:
        console.print(Text(f"... and {len(found) - top} more."))
