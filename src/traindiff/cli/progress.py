"""Progress of commands that read recordings: a bar over their steps, with the time that is left, on a terminal only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from traindiff.errors import TraindiffError


@contextmanager
def step_progress(
    console: Console, doing: str, recordings: Sequence[str], *, steps: str | None = None, endless: bool = False
) -> Iterator[Callable[[int], None]]:
    """Show a bar; what is yielded is called with the number of each step that is done.

    Nothing is written if the console is no terminal, and nothing stays there.

    Args:
        console: Where to show it.
        doing: What is done, e.g. `comparing`.
        recordings: The recordings. The first to end decides how many steps there are.
        steps: The steps that are asked for, as the user wrote them.
        endless: True if the end is not known, because the run goes on.
    """
    columns = (
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[place]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    shown = console.is_terminal
    last = last_step(recordings, steps) if shown and not endless else None
    with Progress(*columns, console=console, transient=True, disable=not shown) as bar:
        task = bar.add_task(doing, total=None, place="")
        first: int | None = None

        def step_done(step: int) -> None:
            nonlocal first
            if first is None:
                first = step
            total = None if last is None or last < step else last - first + 1
            place = f"step {step}" if total is None else f"step {step} of {last}"
            bar.update(task, completed=step - first + 1, total=total, place=place)

        yield step_done


def last_step(recordings: Sequence[str], steps: str | None) -> int | None:
    """The number of the last step that will be read; None if it is not known.

    Args:
        recordings: Paths. One that cannot be used is not reported here.
        steps: The steps that are asked for.
    """
    from traindiff.core.steps import StepSelection, parse_steps
    from traindiff.storage import open_recording

    selection = parse_steps(steps, where="")
    try:
        found = [open_recording(path) for path in recordings]
        lasts = [one.last_step(one.ranks[0]) for one in found if one.ranks]
    except (TraindiffError, OSError):
        return None
    if not lasts or None in lasts or not isinstance(selection, StepSelection):
        return None
    last = min(one for one in lasts if one is not None)
    return next((step for step in range(last, max(-1, last - _SEARCHED), -1) if step in selection), None)


_SEARCHED = 1_000_000
"""Steps before the last one among which the last selected one is looked for."""
