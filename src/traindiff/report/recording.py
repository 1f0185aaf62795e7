"""A recording in the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.text import Text

from traindiff.findings.sentences import phase_text
from traindiff.recording import Recording
from traindiff.report.observations import Row
from traindiff.report.terminal import columns


def print_head(console: Console, recording: Recording) -> None:
    """Print what the recording is of, and how its ranks end."""
    run = recording.run
    versions = run.get("versions", {})
    settings = run["settings"]
    console.print(Text(recording.path, style="bold"))
    console.print(
        f"recorded {run.get('created', 'at an unknown time')} with torch {versions.get('torch', 'unknown')}, "
        f"{recording.world_size} rank{'s' if recording.world_size > 1 else ''}; "
        f"observed {', '.join(settings['observe'])}",
        markup=False,
        soft_wrap=True,
    )
    for rank in recording.ranks:
        if (status := recording.status(rank)).says:
            console.print(status.says, markup=False, soft_wrap=True)


def print_rows(console: Console, rows: Iterable[Row], *, rest: Iterable[Row]) -> None:
    """Print the first rows as a table, and how many more there are."""
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
    more = sum(1 for _ in rest)
    if more:
        console.print(f"\n{more} more observations; --site, --phase, --steps choose, --top shows more.", markup=False)
    elif not shown:
        console.print("No observation matches. --site '*' lists all of them.", markup=False)


def _phase(row: Row) -> str:
    return phase_text(row["phase"], row["stage"])


def _site(row: Row) -> str:
    call = f" call {row['call']}" if row["call"] else ""
    return f"{row['site']} {row['slot']}{call}" + (f" micro-step {row['micro_step']}" if row["micro_step"] else "")


def _digits(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
