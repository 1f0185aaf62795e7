"""What `traindiff` says by itself: the recordings that are here, and what to ask of them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from traindiff.core.site import printable
from traindiff.present.viewer.catalog import Catalog, Listed

DEPTH = 3
"""Levels of directories in which recordings are looked for."""

MOST = 10
"""Recordings that are listed."""

ENDINGS = {
    "closed": "",
    "aborted": "ended by an error",
    "unclosed": "still recording, or killed",
    "unreadable": "cannot be read",
    "unread": "",
}
"""What is said of how a recording ends."""

BEGIN = (
    ("traindiff demo --tour", "record, compare, report, check and watch a small training (two minutes)"),
    ("traindiff run -o runs/base train.py", "record a script as it is; its arguments follow"),
    ("traindiff check runs/base", "is that run healthy?"),
)
"""How to begin: commands, and what each does."""

FURTHER = (
    "All commands: traindiff --help. What a word means: traindiff explain WORD. "
    "For a program: traindiff explain agents."
)


def print_overview(console: Console, directory: Path) -> None:
    """Print the recordings below a directory, the latest first, and the commands that say more about them.

    Args:
        console: Where to print.
        directory: Where to look, at most `DEPTH` levels deep.
    """
    catalog = Catalog(directory, depth=DEPTH)
    found = catalog.recordings()
    if found:
        _print_recordings(console, found, has_more=catalog.has_more)
        commands = tuple(_questions(found))
        console.print(Text("\nWhat to ask", style="bold"))
    else:
        commands = BEGIN
        nothing = f"There is no recording in this directory, down to {DEPTH} levels of directories. To begin:"
        console.print(Text(nothing, style="bold"), soft_wrap=True)
    table = Table(box=None, pad_edge=False, show_header=False)
    for command, answer in commands:
        table.add_row(Text(f"  {command}"), Text(answer, style="dim"))
    console.print(table)
    console.print(Text(f"\n{FURTHER}"), soft_wrap=True)


def _print_recordings(console: Console, found: Sequence[Listed], *, has_more: bool) -> None:
    shown = "" if len(found) <= MOST else f", the latest {MOST}"
    count = "1 recording" if len(found) == 1 else f"{len(found)} recordings"
    console.print(Text(f"{'more than ' * has_more}{count} here{shown}", style="bold"))
    table = Table(box=None, pad_edge=False, show_header=False)
    for one in found[:MOST]:
        ranks = "" if not one.ranks else "1 rank" if one.ranks == 1 else f"{one.ranks} ranks"
        size = f"{one.size_bytes / 1e6:.1f} MB" if one.size_bytes else ""
        cells = (f"  {printable(one.name)}", one.created[:16].replace("T", " "), ranks, size, ENDINGS[one.ending])
        table.add_row(*map(Text, cells))
    console.print(table)


def _questions(found: Sequence[Listed]) -> Iterator[tuple[str, str]]:
    usable = [one for one in found if one.ending != "unreadable" and one.name.isprintable()]
    if not usable:
        yield "traindiff check RECORDING", "why can it not be read?"
        return
    baseline, candidate = _pair(usable)
    yield f"traindiff check {_quoted(candidate)}", "is this run healthy?"
    if baseline is not candidate:
        yield (
            f"traindiff compare {_quoted(baseline)} {_quoted(candidate)}",
            "where do the two first diverge?",
        )
        yield (
            f"traindiff report {_quoted(baseline)} {_quoted(candidate)} -o report.html",
            "how does the difference spread?",
        )
    yield f"traindiff show {_quoted(candidate)} --phase loss", "what are its losses?"
    yield "traindiff view .", "all recordings, in a browser"


def _pair(found: Sequence[Listed]) -> tuple[Listed, Listed]:
    """The recording that is called a baseline, or else the one before the latest; and the latest other one.

    Both are of one model. If the latest one is alone with its model, it is both.
    """
    named = [one for one in found if "base" in Path(one.name).name.lower()]
    latest = next((one for one in found if one not in named), found[0])
    others = [one for one in (*named, *found) if one is not latest and one.model == latest.model]
    return (others[0] if others else latest), latest


def _quoted(one: Listed) -> str:
    return shlex.quote(one.name)
