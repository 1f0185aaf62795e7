"""`traindiff compare`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from traindiff.cli.app import app, messages, print_result, results, says_what_is_wrong
from traindiff.cli.following import follower, hand_on
from traindiff.cli.given import chosen_format
from traindiff.cli.options import (
    SHOWN,
    AcceptOption,
    AlertOption,
    AtolOption,
    BaselineArgument,
    CandidateArgument,
    FollowOption,
    FormatOption,
    HtmlOption,
    IdenticalOption,
    IgnoreOption,
    JsonOption,
    JunitOption,
    MapOption,
    NoiseOption,
    OffsetOption,
    PatienceOption,
    RenameOption,
    RtolOption,
    StepsOption,
    TopOption,
    WebhookOption,
    WorkersOption,
)
from traindiff.cli.output_file import check_writable
from traindiff.cli.progress import step_progress
from traindiff.cli.report import write_page
from traindiff.errors import ConfigError, Problem

if TYPE_CHECKING:
    from traindiff.analyse.compare import Comparison
    from traindiff.core.steps import StepSelection


TableOption = Annotated[
    str | None,
    typer.Option(
        metavar="STEPS|first",
        rich_help_panel=SHOWN,
        help="Print every site of these steps in execution order, both runs side by side, in place of the largest "
        "differences; first is the step of the first divergence. With --format csv, too.",
    ),
]
"""Option of commands that compare two runs."""


def checked_table(text: str, *, form: str) -> StepSelection | None:
    """The steps that `--table` asks for; None for the step of the first divergence.

    Raises:
        ConfigError: The text names no steps, or the format has no table.
    """
    from traindiff.present.data.step_rows import parse_table

    if form not in ("text", "csv"):
        fix = "Leave out one of the two; --format csv has the table for programs."
        problem = Problem(where=f"--table {text}", what=f"is no part of --format {form}.", fix=fix)
        raise ConfigError("compare", [problem], consequence="nothing was compared")
    return parse_table(text)


def print_table(result: Comparison, steps: StepSelection | None, *, form: str) -> None:
    """Print the verdict of a comparison with a history, and the table of these steps; with `csv`, the table alone.

    Raises:
        ConfigError: There are no such steps.
    """
    from traindiff.present.data.step_rows import print_rows, step_rows, write_rows
    from traindiff.present.text.results import print_report

    assert result.history is not None
    rows = step_rows(result, result.history, steps)
    if form == "csv":
        write_rows(sys.stdout, rows)
        return
    print_report(results, result, top=0)
    print_rows(results, rows)


@app.command()
@says_what_is_wrong
def compare(
    context: typer.Context,
    baseline: BaselineArgument,
    candidate: CandidateArgument,
    steps: StepsOption = None,
    workers: WorkersOption = None,
    noise: NoiseOption = None,
    rename: RenameOption = None,
    layout: MapOption = None,
    accept: AcceptOption = None,
    ignore: IgnoreOption = None,
    rtol: RtolOption = None,
    atol: AtolOption = None,
    identical: IdenticalOption = False,
    offset: OffsetOption = None,
    html: HtmlOption = None,
    pictures: Annotated[
        Path | None,
        typer.Option(
            metavar="DIRECTORY",
            rich_help_panel=SHOWN,
            help="Draw how similar the directions of gradients are, by parameter and step. Both recordings need signs.",
        ),
    ] = None,
    top: TopOption = 12,
    table: TableOption = None,
    junit: JunitOption = None,
    webhook: WebhookOption = None,
    alert: AlertOption = None,
    form: FormatOption = "text",
    as_json: JsonOption = False,
    follow: FollowOption = False,
    patience: PatienceOption = 600.0,
) -> None:
    """Compare two recordings and name the first divergence.

    Exits with 0 if the runs are identical or equivalent, 1 if they diverged, 2 if the input cannot be
    used, and 3 if they are misaligned or could only be compared in part.
    """
    from traindiff.analyse.compare import compare as compare_recordings
    from traindiff.present.text.results import print_report

    form = chosen_format(context, form, as_json=as_json)
    shown = None if table is None else checked_table(table, form=form)
    if html is not None:
        check_writable(html)
    if pictures is not None:
        from traindiff.present.pictures import check_matplotlib

        check_matplotlib(f"--pictures {pictures}", asked_by="compare")
    waiting = follower(context, follow, patience, webhook, junit, alert or ())
    with step_progress(messages, "comparing", (baseline, candidate), steps=steps, endless=follow) as on_step:
        result = compare_recordings(
            baseline,
            candidate,
            noise=noise or (),
            rename=rename,
            map=layout,
            accept=accept,
            ignore=ignore,
            steps=steps,
            rtol=rtol,
            atol=atol,
            identical=identical,
            offset=offset,
            follow=waiting,
            workers=workers,
            history=html is not None or table is not None,
            progress=on_step,
        )
    if html is not None:
        write_page(result, html)
    if pictures is not None:
        _draw(result, pictures)
    try:
        if table is None:
            print_result(result, form, text=lambda: print_report(results, result, top=top))
        else:
            print_table(result, shown, form=form)
    finally:  # also if nobody reads what is printed
        hand_on(result, webhook, junit, alert or ())
    raise typer.Exit(result.exit_code)


def _draw(result: Comparison, directory: Path) -> None:
    from traindiff.errors import ConfigError, Problem
    from traindiff.present.direction_pictures import draw

    if result.directions is None or not result.directions.parameters:
        problem = Problem(
            where=f"--pictures {directory}",
            what="asks for directions of gradients, and the recordings have none in common.",
            fix='Record both runs with detail="signs".',
        )
        raise ConfigError("compare", [problem], consequence="nothing was drawn")
    try:
        drawn = draw(result.directions, directory)
    except OSError as error:
        fix = "Give the path of a directory where you may write."
        problem = Problem(where=f"--pictures {directory}", what=f"cannot be written: {error.strerror}.", fix=fix)
        raise ConfigError("compare", [problem], consequence="not all was drawn") from None
    messages.print(f"traindiff: wrote {len(drawn)} pictures to {directory}", markup=False, soft_wrap=True)
