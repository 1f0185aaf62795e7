"""A check of one run in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from traindiff.findings import Finding
from traindiff.findings.groups import grouped
from traindiff.findings.sentences import also_text, phase_text, where_text
from traindiff.health import Verdict
from traindiff.report.columns import columns

_STYLES = {"healthy": "bold green", "unhealthy": "bold red", "incomplete": "bold yellow"}


def print_check(console: Console, verdict: Verdict, *, top: int) -> None:
    """Print the verdict, the first finding and the first warning in full, further ones in tables, and what limits it.

    Args:
        console: Where to print; decides about colours and width.
        verdict: What to print.
        top: Rows of each table at most; 0 prints none.
    """
    word, colon, rest = verdict.sentence().partition(":")
    console.print(Text.assemble((word, _STYLES[verdict.verdict]), colon, rest), soft_wrap=True)
    _print_findings(console, verdict.findings, "finding", top=top)
    _print_findings(console, verdict.warnings, "warning", top=top)
    for number, line in enumerate(verdict.notes):
        console.print(("" if number else "\n") + line, markup=False, highlight=False, soft_wrap=True)


def _print_findings(console: Console, findings: Sequence[Finding], what: str, *, top: int) -> None:
    """Print the first of them in full, and the others in a table."""
    groups = grouped(findings)
    if not groups:
        return
    first, *further = groups
    console.print()
    console.print(Text.assemble((f"First {what}: ", "bold"), (where_text(first.first), "bold cyan")), soft_wrap=True)
    console.print(Text(f"  {first.first.says}"), soft_wrap=True)
    if also := also_text(first.paths):
        console.print(Text(f"  {also}"), soft_wrap=True)
    if top and further:
        shown = "" if len(further) <= top else f", the first {top}"
        console.print(Text(f"\nFurther {what}s: {len(further)}{shown}", style="bold"))
        table = columns(left=("step", "phase", "site", "what"), right=())
        for group in further[:top]:
            one = group.first
            table.add_row(*map(Text, (str(one.step), phase_text(one.phase, one.stage), group.site, one.says)))
        console.print(table)
