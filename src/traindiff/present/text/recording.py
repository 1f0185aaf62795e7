"""A recording in the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from traindiff.analyse.findings import phase_text
from traindiff.core.observation import SAMPLE
from traindiff.core.site import PHASES
from traindiff.present.data.observations import Row
from traindiff.present.text.layout import exact_digits, print_line, print_table
from traindiff.storage import Recording
from traindiff.storage.manifest import framework


def print_head(console: Console, recording: Recording) -> None:
    """Print where, when and with what a run was recorded, and how its ranks ended."""
    run = recording.run
    observed = ", ".join(run["settings"].get("observe", ())) or "nothing"
    console.print(Text(recording.path, style="bold"))
    ranks = f"{recording.world_size} rank{'s' if recording.world_size > 1 else ''}"
    began = run.get("created", "at an unknown time")
    print_line(console, Text(f"recorded {began} with {' '.join(framework(run))}, {ranks}; observed {observed}"))
    if recording.is_compact:
        console.print("its ranks are merged (traindiff compact): a row holds the numbers of all ranks", markup=False)
    for rank in recording.ranks:
        if (status := recording.status(rank)).message:
            print_line(console, Text(status.message))


def print_rows(console: Console, rows: Iterable[Row], *, rest: Iterable[Row], recorded: bool = True) -> None:
    """Print the first rows as a table, and how many follow (`rest`); `recorded` is true if the recording has a step."""
    shown = list(rows)
    cells = [
        (str(row["step"]), _phase(row), _site(row), f"{row['dtype']} {row['shape']}", *_numbers(row)) for row in shown
    ]
    if shown:
        console.print()
        print_table(
            console,
            cells,
            left=("step", "phase", "site", "tensor"),
            right=("norm", "mean", "min", "max", "zero", "nan", "inf"),
            may_lack=("zero", "nan", "inf", "tensor", "mean"),
        )
    for row in shown:
        if row["unobserved"]:
            console.print(f"step {row['step']}: {_site(row)} was not observed: {row['unobserved']}", markup=False)
    more, last, phases = 0, 0, {row["phase"] for row in shown}
    for row in rest:
        more, last = more + 1, max(last, row["step"])
        phases.add(row["phase"])
    if more:
        known = ", ".join(name for name in PHASES if name in phases)
        choose = f"--site, --phase ({known}) and --steps choose, --top shows more."
        print_line(console, Text(f"\n{more} more observations, up to step {last}; {choose}"))
    elif not shown and not recorded:
        console.print("No step is recorded: one is when the optimizer has stepped.", markup=False)
    elif not shown:
        console.print("No observation matches. --site '*' lists all of them.", markup=False)


def _phase(row: Row) -> str:
    return phase_text(row["phase"], row["stage"])


def _site(row: Row) -> str:
    counted = row["stage"] == SAMPLE
    call = f" {'sample' if counted else 'call'} {row['call']}" if row["call"] or counted else ""
    moment = f" evaluation {row['evaluation']}" if row["evaluation"] else ""
    moment += f" micro-step {row['micro_step']}" if row["micro_step"] else ""
    return f"{row['site']} {row['slot']}{call}{moment}"


def _numbers(row: Row) -> list[str]:
    """The numbers of a row; those of a single element with all digits that its dtype may have."""
    places = 9 if row["count"] == 1 else 3
    names = ("norm", "mean", "minimum", "maximum", "zero", "nan", "inf")
    return ["-" if row[name] is None else exact_digits(row[name], places) for name in names]
