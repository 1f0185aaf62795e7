"""`traindiff export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from traindiff.cli.app import app, messages, says_what_is_wrong

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
    from traindiff.errors import ConfigError
    from traindiff.recording import open_recording
    from traindiff.report.exports import exporter
    from traindiff.report.scalars import Wanted, check_phases, scalars
    from traindiff.steps import StepSelection, parse_steps

    output = directory or output
    if tool == MSPROBE:
        from traindiff.interop.msprobe.exporting import export_gradients

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
