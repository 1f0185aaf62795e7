"""A matrix of verifications in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from traindiff.comparison.matrix import Matrix
from traindiff.report.columns import columns


def print_matrix(console: Console, matrix: Matrix) -> None:
    """Print a row for each combination, and how many have which verdict.

    Args:
        console: Where to print.
        matrix: What to print.
    """
    console.print(Text(f"{matrix.recipe}; a report of each combination is below {matrix.output}"), soft_wrap=True)
    console.print()
    table = columns(left=("combination", "verdict", "first divergence, or why it was not run"), right=("time",))
    for row in matrix.rows:
        time = "kept" if row.kept else f"{row.seconds:.1f} s" if row.seconds else ""
        table.add_row(*map(Text, (row.name, row.verdict, row.says, time)))
    console.print(table)
    words = dict.fromkeys(row.verdict for row in matrix.rows)
    counts = [f"{sum(row.verdict == word for row in matrix.rows)} {word}" for word in words]
    console.print()
    console.print(
        Text(f"{len(matrix.rows)} combination{'' if len(matrix.rows) == 1 else 's'}: {', '.join(counts)}."),
        soft_wrap=True,
    )
