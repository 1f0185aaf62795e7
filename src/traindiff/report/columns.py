"""Tables in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table


def columns(*, left: Sequence[str], right: Sequence[str]) -> Table:
    """An empty table without borders."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table
