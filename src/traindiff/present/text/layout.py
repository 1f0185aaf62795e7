"""Lines and tables that stay readable in 80 columns, and numbers that keep what tells them apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

LEAST_SITE = 24
"""Fewest characters of a site for which no column is left out."""

LEAST_TEXT = 30
"""Width that a column of sentences has at least, if the table is as wide as the terminal."""

SITES = frozenset({"site", "operator"})
"""Columns whose cells are shortened in the middle if they have no room."""

SENTENCES = frozenset({"what", "what was found"})
"""Columns whose cells go on in further lines."""

_GAP = 2

_LAST_RESORT = 14
"""Fewest characters of a site in a table that is too wide without its optional columns."""


def print_line(console: Console, text: Text) -> None:
    """Print a line. On a terminal, it is broken between words, and what follows begins below its first word."""
    if not console.is_terminal:
        console.print(text, soft_wrap=True)  # as it is: a program, or a pager, reads it
        return
    above = len(text.plain) - len(text.plain.lstrip("\n"))
    text = text[above:]
    indent = len(text.plain) - len(text.plain.lstrip(" "))
    console.print(Padding(text[indent:], (above, 0, 0, indent), expand=False))


def columns(*, left: Sequence[str], right: Sequence[str] = ()) -> Table:
    """An empty table without borders, from the names of its columns, by how these are aligned."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def print_table(
    console: Console,
    rows: Sequence[Sequence[str]],
    *,
    left: Sequence[str],
    right: Sequence[str] = (),
    last: Sequence[str] = (),
    styles: Sequence[str | None] = (),
    may_lack: Sequence[str] = (),
) -> None:
    """Print a table whose sites are shortened as far as the width of the console asks for.

    Args:
        console: Where to print; its width decides.
        rows: The cells of each row, in the order of the columns.
        left: Names of the columns on the left, which are aligned to the left.
        right: Names of columns of numbers.
        last: Names of columns after these, aligned to the left.
        styles: A style for each row; none if left out.
        may_lack: Columns to leave out, in this order, while the table is too wide: first those with nothing but `0`.
            If others are left out, a line below the table says so.
    """
    names = [*left, *right, *last]
    widths = [max(map(cell_len, cells), default=0) for cells in zip(names, *rows, strict=True)]
    least = [_least(name, width) for name, width in zip(names, widths, strict=True)]
    kept = list(range(len(names)))
    empty = [at for at, name in enumerate(names) if name in may_lack and all(row[at] == "0" for row in rows)]
    others = [names.index(name) for name in may_lack if names.index(name) not in empty]
    for at in (*empty, *others):
        if sum(least[one] for one in kept) + _GAP * (len(kept) - 1) > console.width:
            kept.remove(at)
    fixed = sum(least[at] for at in kept if names[at] not in SITES) + _GAP * (len(kept) - 1)
    room = max(_LAST_RESORT, (console.width - fixed) // max(1, sum(names[at] in SITES for at in kept)))
    table = columns(left=())
    for at in kept:
        justify: Literal["left", "right"] = "right" if names[at] in right else "left"
        table.add_column(names[at], justify=justify, no_wrap=names[at] not in SENTENCES, overflow="fold")
    for number, row in enumerate(rows):
        cells = [shortened(row[at], room) if names[at] in SITES else row[at] for at in kept]
        table.add_row(*map(Text, cells), style=styles[number] if styles else None)
    console.print(table)
    if lacks := [names[at] for at in others if at not in kept]:
        print_line(console, Text(f"(left out for lack of width: {', '.join(lacks)})", style="dim"))


def _least(name: str, width: int) -> int:
    if name in SITES:
        return min(width, LEAST_SITE)
    return min(width, LEAST_TEXT) if name in SENTENCES else width


def shortened(text: str, room: int) -> str:
    """A text of at most `room` characters: its middle is left out, as both ends of a path tell it from others."""
    if len(text) <= room:
        return text
    tail = max(1, (room - 1) * 2 // 3)
    return f"{text[: room - 1 - tail]}…{text[-tail:]}"


def exact_digits(value: float, places: int) -> str:
    """A number with so many digits; whole numbers up to a billion with all of theirs."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e9:
        return str(int(value))
    return f"{value:.{places}g}"


def told_apart(baseline: float, candidate: float, places: int = 6) -> tuple[str, str]:
    """Two numbers with as many digits, at least `places`, as show that they differ, if they do."""
    for digits in range(places, 18):
        texts = exact_digits(baseline, digits), exact_digits(candidate, digits)
        if texts[0] != texts[1] or baseline == candidate or math.isnan(baseline) or math.isnan(candidate):
            break
    return texts
