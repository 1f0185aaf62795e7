"""`traindiff show`, `traindiff export` and `traindiff import`: recordings for people, and for other tools."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from traindiff.cli.app import app, messages, results, says_what_is_wrong
from traindiff.cli.command import Application
from traindiff.cli.given import chosen_format, refuse_here
from traindiff.cli.options import (
    JUDGED,
    SHOWN,
    JsonOption,
    OverwriteOption,
    PhaseOption,
    RecordingArgument,
    SiteOption,
    StepsOption,
    TopOption,
)
from traindiff.cli.output_file import check_writable, is_special, written_whole


class Format(StrEnum):
    """Formats of `traindiff show`."""

    TEXT = "text"
    CSV = "csv"
    JSON = "json"
    PARQUET = "parquet"


@app.command()
@says_what_is_wrong
def show(
    context: typer.Context,
    recording: RecordingArgument,
    steps: StepsOption = None,
    site: SiteOption = "*",
    phase: PhaseOption = None,
    samples: Annotated[
        bool,
        typer.Option("--samples", rich_help_panel=JUDGED, help="Also list the samples of each batch one by one."),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", rich_help_panel=SHOWN, help="File to write to."),
    ] = None,
    top: TopOption = 40,
    form: Annotated[
        Format,
        typer.Option(
            "--format",
            "-f",
            metavar="|".join(Format),
            rich_help_panel=SHOWN,
            help="text for people, the others for programs.",
        ),
    ] = Format.TEXT,
    as_json: JsonOption = False,
) -> None:
    """List a recording's steps, sites and their numbers."""
    from traindiff.analyse.merge.rank_steps import rank_steps
    from traindiff.errors import ConfigError, Problem
    from traindiff.present.data import observations as table
    from traindiff.present.text.recording import print_head, print_rows
    from traindiff.storage import open_recording

    form = Format(chosen_format(context, form, as_json=as_json))
    wanted = table.parse_filter(
        site, tuple(phase or ()), steps, samples=samples, asked_by="show", consequence="nothing was done"
    )
    if form is Format.PARQUET and output is None:
        fix = "Add --output FILE.parquet."
        raise ConfigError("show", [Problem(where="--format parquet", what="is not for the terminal.", fix=fix)])
    if output is not None and not is_special(output):  # a pipe has a reader, which waits for the table
        check_writable(output, option="--output", asked_by="show", consequence="nothing was done")
    found = open_recording(recording)
    rows = table.rows(found, wanted)

    if form is Format.PARQUET and output is not None:
        with written_whole(output, "w+b") as binary:
            table.write_parquet(rows, binary)
        return
    with written_whole(output, "w+", encoding="utf-8", newline="") if output else nullcontext(sys.stdout) as text:
        if form is Format.CSV:
            table.write_csv(rows, text)
        elif form is Format.JSON:
            table.write_json(rows, text, recording=found)
        else:
            console = Console(file=text, highlight=False, emoji=False, width=results.width) if output else results
            print_head(console, found)
            recorded = any(True for _ in rank_steps(found))
            print_rows(console, islice(rows, top), rest=rows, recorded=recorded)


tools = Application(no_args_is_help=True, help="Make a recording of what another tool has written.")
app.add_typer(tools, name="import")


@tools.callback()
def _importing() -> None:
    """Make a recording of what another tool has written."""


@tools.command("msprobe")
@says_what_is_wrong
def import_msprobe(
    directory: Annotated[str, typer.Argument(metavar="DIRECTORY", help="The monitor's dump_path.")],
    recording: Annotated[str, typer.Argument(metavar="RECORDING", help="Recording to make.")],
    overwrite: OverwriteOption = False,
) -> None:
    """Make a recording of what msprobe's gradient monitor has written: directions, extremes and norms."""
    from traindiff.compat.msprobe.importing import import_gradients

    count = import_gradients(directory, recording, overwrite=overwrite)
    messages.print(f"traindiff: wrote {count} gradients to {recording}", markup=False, soft_wrap=True)


@tools.command("onnxruntime")
@says_what_is_wrong
def import_onnxruntime(
    directory: Annotated[str, typer.Argument(metavar="DIRECTORY", help="The subscriber's output_dir.")],
    recording: Annotated[str, typer.Argument(metavar="RECORDING", help="Recording to make.")],
    overwrite: OverwriteOption = False,
) -> None:
    """Make a recording of what ONNX Runtime's StatisticsSubscriber has written: the first elements of activations."""
    from traindiff.compat.onnxruntime.importing import import_statistics

    count = import_statistics(directory, recording, overwrite=overwrite)
    messages.print(f"traindiff: wrote {count} tensors to {recording}", markup=False, soft_wrap=True)


MSPROBE = "msprobe"
"""The one tool that reads gradients and no scalars."""


@app.command(short_help="Export scalars of a recording to TensorBoard or Weights & Biases.")
@says_what_is_wrong
def export(
    context: typer.Context,
    tool: Annotated[str, typer.Argument(metavar="tensorboard|wandb|msprobe", help="Which tool is to read them.")],
    recording: RecordingArgument,
    directory: Annotated[
        Path | None, typer.Argument(metavar="DIRECTORY", help="Directory to write to; the same as --output.")
    ] = None,
    steps: StepsOption = None,
    site: Annotated[
        str,
        typer.Option(
            metavar="GLOB",
            rich_help_panel=JUDGED,
            help="Sites of which norm and largest |x| are given too, e.g. 'transformer.h.3.*'.",
        ),
    ] = "",
    phase: PhaseOption = None,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="DIRECTORY", rich_help_panel=SHOWN, help="Directory to write to."),
    ] = Path("exported"),
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", rich_help_panel=SHOWN, help="Replace msprobe's files that are there."),
    ] = False,
) -> None:
    """Export losses, logged numbers, optimizer settings and the gradient norm, step by step.

    For msprobe it is the gradients, as its gradient monitor writes them: tables, and directions if there are signs.
    Ranks are merged. Nothing is sent: `tensorboard --logdir` reads what is written, and `wandb sync` sends it.
    """
    from traindiff.present.data.exports import exporter, scalars
    from traindiff.present.data.observations import parse_filter
    from traindiff.storage import open_recording

    if directory is not None:
        refuse_here(
            context, ("output",), what=f"gives a second directory beside {directory}.", fix="Leave out one of the two.",
            consequence="nothing was exported",
        )  # fmt: skip
        output = directory
    if tool == MSPROBE:
        refuse_here(
            context, ("steps", "site", "phase"), what="has no effect with msprobe, which gets all gradients.",
            fix="Leave it out.", consequence="nothing was exported",
        )  # fmt: skip
        from traindiff.compat.msprobe.exporting import export_gradients

        count = export_gradients(open_recording(recording), str(output), overwrite=overwrite)
        messages.print(f"traindiff: wrote {count} gradients to {output}", markup=False, soft_wrap=True)
        return
    write = exporter(tool, beside=(MSPROBE,))
    refuse_here(
        context, ("overwrite",), what=f"is for msprobe's files; {tool} adds a file of its own.",
        fix="Leave it out.", consequence="nothing was exported",
    )  # fmt: skip
    shown = site or ("*" if phase else "")
    wanted = parse_filter(shown, tuple(phase or ()), steps, asked_by="export", consequence="nothing was exported")
    found = open_recording(recording)
    with messages.status("exporting"):
        count = write(found, scalars(found, wanted), output)
    messages.print(f"traindiff: wrote {count} scalars to {output}", markup=False, soft_wrap=True)
