"""`traindiff rerun`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from traindiff.cli.app import app, messages, results, says_what_is_wrong
from traindiff.cli.options import RUNS, DeviceOption, JsonOption
from traindiff.observe.torch.nonfinite.contained import GIB, SECONDS, find_cause_contained
from traindiff.present.data import json_text


@app.command(short_help="Run again a module that made NaN or infinity, in longer dtypes.")
@says_what_is_wrong
def rerun(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="What traindiff.watch has saved.")],
    device: DeviceOption = "cpu",
    seconds: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", rich_help_panel=RUNS, help="How long it may take.")
    ] = SECONDS,
    memory: Annotated[
        float,
        typer.Option(
            min=0.5,
            metavar="GIB",
            rich_help_panel=RUNS,
            help="How much memory it may take (or 64 times its file of tensors, if that is more).",
        ),
    ] = GIB,
    as_json: JsonOption = False,
) -> None:
    """Run the operators of one module's call again, in its own dtypes, in float32 and in float64.

    This is safe for a call that somebody else saved, too: the operators run in a separate process with limits on time
    and memory, and only operators that compute from tensors and numbers are called.

    Exits with 0 if the dtype causes the overflow, 1 if the result is not finite even in float64, 2 if the input cannot
    be used, and 3 if the output is finite this time, or an operator could not be run.
    """
    with messages.status("running"):
        found = find_cause_contained(directory, device=device, seconds=seconds, gib=memory)
    if as_json:
        results.print(json_text(found.content, indent=2), markup=False, soft_wrap=True)
    else:
        results.print("\n".join(found.lines), markup=False, soft_wrap=True)
    raise typer.Exit(found.exit_code)
