"""A bar that shows how far the runs of a recipe are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


@dataclass(slots=True)
class RunBar:
    """A bar over all steps of all runs; called when one of them has taken a step."""

    _bar: Progress
    _task: TaskID
    _known: int
    _begun: dict[str, int] = field(default_factory=dict)
    _done: dict[str, int] = field(default_factory=dict)

    def __call__(self, name: str, step: int, count: int) -> None:
        """A run has taken a step, as `traindiff.recipes.runs.Progress` has it."""
        self._begun[name], self._done[name] = count, step
        total = max(self._known, sum(self._begun.values()))
        self._bar.update(self._task, description=name, completed=sum(self._done.values()), total=total)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Inside it, something else is printed."""
        self._bar.stop()
        yield
        self._bar.start()


@contextmanager
def run_progress(console: Console, *, steps: int, shown: bool = True) -> Iterator[RunBar]:
    """Show a bar over all steps of all runs; without a terminal, nothing.

    Args:
        console: Where to.
        steps: How many are known to come. Those of further runs are added when they begin.
        shown: Whether there is to be one.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        yield RunBar(bar, bar.add_task("starting", total=steps), steps)
