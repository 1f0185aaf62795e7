"""An investigation in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from traindiff.comparison.investigation import Investigation, Stage
from traindiff.comparison.verification import Sides, what_is_run
from traindiff.report.operators import print_zooms
from traindiff.report.terminal import WORD_STYLES


def print_investigation(console: Console, investigation: Investigation, *, top: int) -> None:
    """Print the story: what was asked, what was found, the walk through the operators, the verdict.

    Args:
        console: Where to print; decides about colours and width.
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
    console.print(Text(f"   {stage.says}\n"), soft_wrap=True)


def print_conclusion(console: Console, investigation: Investigation, *, top: int) -> None:
    """Print the walk through the operators, the verdict, and what it took."""
    deciding = investigation.deciding
    if deciding is not None and deciding.zoomed is not None and top:
        print_zooms(console, deciding.zoomed.comparison, top=top)
        console.print()
    word = investigation.verdict
    console.print(Text.assemble("Verdict: ", (word, WORD_STYLES[word])), soft_wrap=True)
    console.print(Text(f"{investigation.cost} Files: {investigation.output}", style="dim"), soft_wrap=True)
