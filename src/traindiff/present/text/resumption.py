"""The result of a resume in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from traindiff.analyse.compare.resumption import Resumption
from traindiff.analyse.findings import more_line
from traindiff.present.text.results import WORD_STYLES, print_report


def print_resumption(console: Console, result: Resumption, *, top: int) -> None:
    """Print the verdict, what was not restored, and the comparison of the steps.

    Args:
        console: Where to print; decides about colors and width.
        result: What to print.
        top: Rows per table at most; 0 prints no tables.
    """
    console.print(Text(result.message, style=WORD_STYLES.get(result.verdict, "bold yellow")), soft_wrap=True)
    if result.differences:
        console.print(Text(f"\nBefore step {result.at}, its first one after loading", style="bold"), soft_wrap=True)
        for one in result.differences:
            console.print(Text(f"  {one.message}"), soft_wrap=True)
        console.print(Text(f"  {more_line(one.what for one in result.differences)}", style="dim"), soft_wrap=True)
    else:
        but = ", except for what is noted here" if result.notes else ""
        console.print(f"\nBefore step {result.at}, everything was as it had been saved{but}.", soft_wrap=True)
    before, after = result.setups
    if before != after:
        console.print(Text(f"Saved by: {before}. Resumed by: {after}."), soft_wrap=True)
    for note in result.notes:
        console.print(Text(note), soft_wrap=True)
    console.print(Text("\nThe steps after it, against a training that never stopped", style="bold"), soft_wrap=True)
    print_report(console, result.comparison, top=top)
