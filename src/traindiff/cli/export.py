"""`traindiff export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from traindiff.cli.app import app, messages, says_what_is_wrong

tools = typer.Typer(no_args_is_help=True, help="Make a recording of what another tool has written.")
app.add_typer(tools, name="import")


@tools.callback()
def _importing() -> None:
    """Make a recording of what another tool has written."""


@tools.command("msprobe")
@says_what_is_wrong
def import_msprobe(
    directory: Annotated[str, typer.Argument(metavar="DIRECTORY", help="The monitor's dump_path.")],
    recording: Annotated[str, typer.Argument(metavar="RECORDING", help="Recording to make.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a recording that is there.")] = False,
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
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a recording that is there.")] = False,
) -> None:
    """Make a recording of what ONNX Runtime's StatisticsSubscriber has written: the first elements of activations."""
    from traindiff.compat.onnxruntime.importing import import_statistics

    count = import_statistics(directory, recording, overwrite=overwrite)
    messages.print(f"traindiff: wrote {count} tensors to {recording}", markup=False, soft_wrap=True)


MSPROBE = "msprobe"
"""The tool that reads gradients, and no scalars."""


@app.command(short_help="Export scalars of a recording to TensorBoard or Weights & Biases.")
@says_what_is_wrong
def export(
    tool: Annotated[str, typer.Argument(metavar="tensorboard|wandb|msprobe", help="Which tool is to read them.")],
    recording: Annotated[str, typer.Argument(metavar="RECORDING", help="Recording to export.")],
    directory: Annotated[
        Path | None, typer.Argument(metavar="DIRECTORY", help="Directory to write to; the same as --output.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory to write to.")] = Path("exported"),
    site: Annotated[
        str,
        typer.Option(help="Glob over sites of which norm and largest |x| are given too, e.g. 'transformer.h.3.*'."),
    ] = "",
    phase: Annotated[list[str] | None, typer.Option(help="Phase of these sites, e.g. grad. Repeatable.")] = None,
    steps: Annotated[str | None, typer.Option(help='Steps to export, e.g. "0-9,20,30-".')] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace msprobe's files that are there.")] = False,
) -> None:
    """Export losses, logged numbers, optimizer settings and the gradient norm, step by step.

    For msprobe it is the gradients, as its gradient monitor writes them: tables, and directions if there are signs.
    Ranks are merged. Nothing is sent: `tensorboard --logdir` reads what is written, and `wandb sync` sends it.
    """
    from traindiff.core.steps import StepSelection, parse_steps
    from traindiff.errors import ConfigError
    from traindiff.present.data.exports import Wanted, check_phases, exporter, scalars
    from traindiff.storage import open_recording

    output = directory or output
    if tool == MSPROBE:
        from traindiff.compat.msprobe.exporting import export_gradients

        count = export_gradients(open_recording(recording), str(output), overwrite=overwrite)
        messages.print(f"traindiff: wrote {count} gradients to {output}", markup=False, soft_wrap=True)
        return
    write = exporter(tool, beside=(MSPROBE,))
    phases = tuple(phase or ())
    check_phases(phases)
    selection = parse_steps(steps, where="--steps")
    if not isinstance(selection, StepSelection):
        raise ConfigError("export", [selection], consequence="nothing was exported")
    found = open_recording(recording)
    wanted = Wanted(site=site or ("*" if phases else ""), phases=phases, steps=selection)
    with messages.status("exporting"):
        count = write(found, scalars(found, wanted), output)
    messages.print(f"traindiff: wrote {count} scalars to {output}", markup=False, soft_wrap=True)
