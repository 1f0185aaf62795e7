"""A verification in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from traindiff.comparison import Pinned, Verification
from traindiff.comparison.verification import (
    beside_the_comparison,
    cost,
    pinned_heading,
    pinned_limits,
    what_is_run,
    zoomed_lines,
)
from traindiff.findings.sentences import phase_text
from traindiff.report.columns import columns
from traindiff.report.operators import print_zooms
from traindiff.report.terminal import print_comparison


def print_verification(console: Console, verification: Verification, *, top: int) -> None:
    """Print the comparison of the free runs, what was pinned down, and what it took.

    Args:
        console: Where to print; decides about colours and width.
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
        table.add_row(*map(Text, (phase, one.site, one.says, f"{one.ratio:.3g}")))
    console.print(table)
    if len(found) > top:
        console.print(Text(f"... and {len(found) - top} more."))
