"""A bar that shows how far the runs of a recipe are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from traindiff.recipes.runs import Progress as OnStep


@contextmanager
def run_progress(console: Console, *, steps: int, shown: bool = True) -> Iterator[OnStep]:
    """Show a bar over all steps of all runs; without a terminal, nothing.

    Args:
        console: Where to.
        steps: How many are known to come. Those of further runs are added when they begin.
        shown: Whether there is to be one.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task("starting", total=steps)
        begun: dict[str, int] = {}
        done: dict[str, int] = {}

        def on_step(name: str, step: int, count: int) -> None:
            begun[name], done[name] = count, step
            bar.update(task, description=name, completed=sum(done.values()), total=max(steps, sum(begun.values())))

        yield on_step
