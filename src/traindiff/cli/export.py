"""`traindiff export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from traindiff.cli.app import app, messages, says_what_is_wrong


@app.command(short_help="Export scalars of a recording to TensorBoard or Weights & Biases.")
@says_what_is_wrong
def export(
    tool: Annotated[str, typer.Argument(metavar="tensorboard|wandb", help="Which tool is to read them.")],
    recording: Annotated[str, typer.Argument(metavar="RECORDING", help="Recording to export.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory to write to.")] = Path("exported"),
    site: Annotated[
        str,
        typer.Option(help="Glob over sites of which norm and largest |x| are given too, e.g. 'transformer.h.3.*'."),
    ] = "",
    phase: Annotated[list[str] | None, typer.Option(help="Phase of these sites, e.g. grad. Repeatable.")] = None,
    steps: Annotated[str | None, typer.Option(help='Steps to export, e.g. "0-9,20,30-".')] = None,
) -> None:
    """Export losses, logged numbers, optimizer settings and the gradient norm, step by step.

    Ranks are merged. Nothing is sent: `tensorboard --logdir` reads what is written, and `wandb sync` sends it.
    """
    from traindiff.errors import ConfigError
    from traindiff.recording import open_recording
    from traindiff.report.exports import exporter
    from traindiff.report.scalars import Wanted, check_phases, scalars
    from traindiff.steps import StepSelection, parse_steps

    write = exporter(tool)
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
