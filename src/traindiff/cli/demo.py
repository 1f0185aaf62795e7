"""`traindiff demo`."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from traindiff.cli.app import app, messages, results, says_what_is_wrong
from traindiff.cli.options import RUNS, SHOWN, SeedOption

_MICRO_BATCHES = 4


@app.command(short_help="Find a fault in a small training.")
@says_what_is_wrong
def demo(
    fault: Annotated[
        str,
        typer.Option(
            metavar="NAME", rich_help_panel=RUNS, help="Fault to inject into the faulty run; --list shows all."
        ),
    ] = "",
    steps: Annotated[
        int, typer.Option(min=1, metavar="N", rich_help_panel=RUNS, help="Optimizer steps of each run.")
    ] = 8,
    seed: SeedOption = 0,
    tour: Annotated[
        bool,
        typer.Option(
            "--tour",
            rich_help_panel=RUNS,
            help="Record, compare, report, check and watch, each step with its command.",
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIRECTORY",
            rich_help_panel=SHOWN,
            help="Directory of the recordings: traindiff-demo, or traindiff-tour, if left out.",
        ),
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="List the faults and exit.")] = False,
) -> None:
    """Train a small GPT three times, record it, and find the fault in one of them.

    A baseline; a legal variation (the same batches in four micro-batches, correctly scaled); and the same
    with a fault. Recordings of an earlier demo in the same directory are replaced. `--tour` shows more commands.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
    from rich.table import Table

    from traindiff.analyse.compare import compare
    from traindiff.present.text.results import print_verdict
    from traindiff.run.demo.faults import DEFAULT, FAULTS, find_fault
    from traindiff.run.demo.training import train

    if show_list:
        table = Table("fault", "what goes wrong", box=None, pad_edge=False)
        for known in FAULTS.values():
            table.add_row(known.name, known.message)
        results.print(table)
        return
    if tour:
        if fault:
            raise typer.BadParameter("--fault is of the demo without --tour.")
        _tour(output or Path("traindiff-tour"))
        return
    output = output or Path("traindiff-demo")
    chosen = find_fault(fault or DEFAULT)
    runs = (
        ("baseline", "baseline", 1, None),
        ("legal variation", "legal", _MICRO_BATCHES, None),
        ("faulty candidate", f"faulty-{chosen.name}", _MICRO_BATCHES, chosen.name),
    )
    paths = [str(output / directory) for _, directory, _, _ in runs]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=messages, disable=not messages.is_terminal) as progress:
        for (name, _, micro_batches, injected), path in zip(runs, paths, strict=True):
            task = progress.add_task(f"training the {name:<16}", total=steps)

            def show(step: int, task: TaskID = task) -> None:
                progress.update(task, completed=step + 1)

            train(
                path,
                fault=injected,
                micro_batches=micro_batches,
                steps=steps,
                seed=seed,
                overwrite=True,
                on_step=show,
            )
    for title, candidate in (
        (f"Baseline against the same batches in {_MICRO_BATCHES} micro-batches", paths[1]),
        (f"Baseline against {_MICRO_BATCHES} micro-batches with the fault {chosen.name!r}", paths[2]),
    ):
        results.print(f"\n[bold]{title}[/bold]")
        print_verdict(results, compare(paths[0], candidate))
    results.print(f"\nThe fault was: {chosen.message}", soft_wrap=True)
    results.print("\n[bold]What to run next[/bold]")
    for command in (
        "demo --tour",
        f"compare {paths[0]} {paths[2]}",
        f"show {paths[2]} --phase grad --steps 2",
        "demo --list",
    ):
        results.print(f"  {_this_command()} {command}", soft_wrap=True)


def _tour(directory: Path) -> None:
    from rich.text import Text

    from traindiff.run.demo.tour import REPORT, STOPS, prepare, take

    prepare(directory)
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if results.is_terminal:
        environment |= {"FORCE_COLOR": "1", "COLUMNS": str(results.width)}
    results.print(
        f"All files of the tour are in {directory}. It takes one or two minutes.", markup=False, soft_wrap=True
    )
    with messages.status("") as status:
        status.update(STOPS[0].title)
        for number, (stop, lines) in enumerate(take(directory, environment), start=1):
            results.print(Text(f"\n{number} of {len(STOPS)}. {stop.title}", style="bold"), soft_wrap=True)
            results.print(Text(f"$ {' '.join(stop.command)}", style="cyan"), soft_wrap=True)
            for line in lines:
                results.print(Text.from_ansi(line), soft_wrap=True)
            results.print(Text(stop.after, style="dim"), soft_wrap=True)
            if number < len(STOPS):
                status.update(STOPS[number].title)
    results.print(Text("\nWhat to do next", style="bold"))
    for line in (
        f"Open the report in a browser: {(directory / REPORT).resolve()}",
        f"Or all reports, as they are asked for: {_this_command()} view {directory}",
        "Record your own training: traindiff run -o runs/base train.py, or traindiff.record in its code.",
    ):
        results.print(f"  {line}", markup=False, soft_wrap=True)


def _this_command() -> str:
    """The way to call traindiff again: its name if that leads here, else the way in which it was called now."""
    called = sys.argv[0]
    if not called.endswith("traindiff"):
        return "python -m traindiff"
    found = shutil.which("traindiff")
    return "traindiff" if found and Path(found).samefile(called) else called
