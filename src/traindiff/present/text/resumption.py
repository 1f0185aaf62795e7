"""The result of a resume in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from traindiff.analyse.compare.resumption import Resumption
from traindiff.analyse.findings import more_line
from traindiff.present.text.layout import print_line
from traindiff.present.text.results import WORD_STYLES, print_report


def print_resumption(console: Console, result: Resumption, *, top: int) -> None:
    """Print the verdict, what was not restored, and the comparison of the steps.

    Args:
        console: Where to print; decides about colors and width.
        result: What to print.
        top: Rows per table at most; 0 prints no tables.
    """
    print_line(console, Text(result.message, style=WORD_STYLES.get(result.verdict, "bold yellow")))
    if result.differences:
        print_line(console, Text(f"\nBefore step {result.at}, its first one after loading", style="bold"))
        for one in result.differences:
            print_line(console, Text(f"  {one.message}"))
        print_line(console, Text(f"  {more_line(one.what for one in result.differences)}", style="dim"))
    else:
        but = ", except for what is noted here" if result.notes else ""
        print_line(console, Text(f"\nBefore step {result.at}, everything was as it had been saved{but}."))
    before, after = result.setups
    if before != after:
        print_line(console, Text(f"Saved by: {before}. Resumed by: {after}."))
    for note in result.notes:
        print_line(console, Text(note))
    print_line(console, Text("\nThe steps after it, against a training that never stopped", style="bold"))
    print_report(console, result.comparison, top=top)
