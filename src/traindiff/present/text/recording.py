"""A recording in the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from traindiff.analyse.check import Rule, Verdict
from traindiff.analyse.findings import Finding, also_text, grouped, phase_text, where_text
from traindiff.core.observation import SAMPLE
from traindiff.core.site import PHASES
from traindiff.present.data.observations import Row
from traindiff.present.text.comparison import columns
from traindiff.storage import Recording
from traindiff.storage.manifest import framework


def print_rules(console: Console, rules: Iterable[type[Rule]]) -> None:
    """Print each rule's name, whether it warns, what it finds, and its limits as a configuration file sets them."""
    table = columns(left=("rule", "", "what it finds", "limits"), right=())
    for rule in rules:
        limits = "\n".join(f"{name} = {limit.default:g}" for name, limit in rule.limits.items())
        table.add_row(*map(Text, (rule.name, "warns" if rule.warns else "", rule.finds, limits)))
    console.print(table)


_STYLES = {"healthy": "bold green", "unhealthy": "bold red", "incomplete": "bold yellow"}


def print_check(console: Console, verdict: Verdict, *, top: int) -> None:
    """Print the verdict, the first finding and the first warning in full, further ones in tables, and what limits it.

    Args:
        console: Where to print; decides about colors and width.
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
    console.print(Text(f"  {first.first.message}"), soft_wrap=True)
    if also := also_text(first.paths):
        console.print(Text(f"  {also}"), soft_wrap=True)
    if top and further:
        shown = "" if len(further) <= top else f", the first {top}"
        console.print(Text(f"\nFurther {what}s: {len(further)}{shown}", style="bold"))
        table = columns(left=("step", "phase", "site", "what"), right=())
        for group in further[:top]:
            one = group.first
            table.add_row(*map(Text, (str(one.step), phase_text(one.phase, one.stage), group.site, one.message)))
        console.print(table)


def print_head(console: Console, recording: Recording) -> None:
    """Print what the recording is of, and how its ranks end."""
    run = recording.run
    observed = ", ".join(run["settings"].get("observe", ())) or "nothing"
    console.print(Text(recording.path, style="bold"))
    console.print(
        f"recorded {run.get('created', 'at an unknown time')} with {' '.join(framework(run))}, "
        f"{recording.world_size} rank{'s' if recording.world_size > 1 else ''}; "
        f"observed {observed}",
        markup=False,
        soft_wrap=True,
    )
    for rank in recording.ranks:
        if (status := recording.status(rank)).message:
            console.print(status.message, markup=False, soft_wrap=True)


def print_rows(console: Console, rows: Iterable[Row], *, rest: Iterable[Row], recorded: bool = True) -> None:
    """Print the first rows as a table, and how many more there are.

    Args:
        console: Where to print.
        rows: The first ones.
        rest: The others, which are counted.
        recorded: Whether the recording has a step at all.
    """
    shown = list(rows)
    table = columns(
        left=("step", "phase", "site", "tensor"), right=("norm", "mean", "min", "max", "zero", "nan", "inf")
    )
    for row in shown:
        numbers = (row[name] for name in ("norm", "mean", "minimum", "maximum", "zero", "nan", "inf"))
        about = (str(row["step"]), _phase(row), _site(row), f"{row['dtype']} {row['shape']}")
        table.add_row(*map(Text, (*about, *(_digits(value) for value in numbers))))
    if shown:
        console.print()
        console.print(table)
    for row in shown:
        if row["unobserved"]:
            console.print(f"step {row['step']}: {_site(row)} was not observed: {row['unobserved']}", markup=False)
    more, last, phases = 0, 0, {row["phase"] for row in shown}
    for row in rest:
        more, last = more + 1, max(last, row["step"])
        phases.add(row["phase"])
    if more:
        known = ", ".join(name for name in PHASES if name in phases)
        console.print(
            f"\n{more} more observations, up to step {last}; --site, --phase ({known}) and --steps choose, "
            "--top shows more.",
            markup=False,
            soft_wrap=True,
        )
    elif not shown and not recorded:
        console.print("No step is recorded: one is when the optimizer has stepped.", markup=False)
    elif not shown:
        console.print("No observation matches. --site '*' lists all of them.", markup=False)


def _phase(row: Row) -> str:
    return phase_text(row["phase"], row["stage"])


def _site(row: Row) -> str:
    counted = row["stage"] == SAMPLE
    call = f" {'sample' if counted else 'call'} {row['call']}" if row["call"] or counted else ""
    return f"{row['site']} {row['slot']}{call}" + (f" micro-step {row['micro_step']}" if row["micro_step"] else "")


def _digits(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
