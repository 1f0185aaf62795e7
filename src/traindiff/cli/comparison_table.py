"""`traindiff compare --table`: every site of a step, both runs next to each other."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from traindiff.cli.app import results
from traindiff.errors import ConfigError, Problem

if TYPE_CHECKING:
    from traindiff.comparison import Comparison
    from traindiff.steps import StepSelection

TableOption = Annotated[
    str | None,
    typer.Option(
        metavar="STEPS|first",
        help="Print every site of these steps in execution order, both runs side by side, in place of the largest "
        "differences; first is the step of the first divergence. With --format csv, too.",
    ),
]
"""The option of commands that compare two runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenTable:
    """Which steps the table has; None for that of the first divergence."""

    steps: StepSelection | None


def checked_table(text: str, *, form: str) -> ChosenTable:
    """What `--table` asks for.

    Args:
        text: As it was written.
        form: The format of the result.

    Raises:
        ConfigError: It is no steps, or the format has no table.
    """
    from traindiff.report.step_rows import parse_table

    if form not in ("text", "csv"):
        fix = "Leave out one of the two; --format csv has the table for programs."
        problem = Problem(where=f"--table {text}", what=f"is no part of --format {form}.", fix=fix)
        raise ConfigError("compare", [problem], consequence="nothing was compared")
    return ChosenTable(steps=parse_table(text))


def print_table(result: Comparison, chosen: ChosenTable, *, form: str) -> None:
    """Print the verdict and the table; as comma-separated values the table alone.

    Args:
        result: With a history.
        chosen: Which steps.
        form: `text` or `csv`.

    Raises:
        ConfigError: There are no such steps.
    """
    from traindiff.report.step_rows import print_rows, step_rows, write_rows
    from traindiff.report.terminal import print_comparison

    assert result.history is not None
    rows = step_rows(result, result.history, chosen.steps)
    if form == "csv":
        write_rows(sys.stdout, rows)
        return
    print_comparison(results, result, top=0)
    print_rows(results, rows)
