"""`traindiff import`: other tools' files to recordings."""

from __future__ import annotations

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
    from traindiff.interop.msprobe.importing import import_gradients

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
    from traindiff.interop.onnxruntime.importing import import_statistics

    count = import_statistics(directory, recording, overwrite=overwrite)
    messages.print(f"traindiff: wrote {count} tensors to {recording}", markup=False, soft_wrap=True)
