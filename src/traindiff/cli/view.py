"""`traindiff view`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from traindiff.cli.app import app, messages, says_what_is_wrong


@app.command(short_help="Show reports of all recordings under a directory in a browser.")
@says_what_is_wrong
def view(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Recordings are looked for under it.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 for any that is free.")] = 8421,
    browse: Annotated[bool, typer.Option("--open", help="Open the list in the browser.")] = False,
) -> None:
    """Serve reports of all recordings under a directory on this machine, until it is interrupted.

    A report of a run that is still recording brings itself up to date. Nothing is written, and nothing outside the
    directory is read.
    """
    from traindiff.errors import ConfigError, Problem
    from traindiff.present.viewer import Viewer

    if not directory.is_dir():
        what = "is not a directory." if directory.exists() else "does not exist."
        fix = "Give the directory that holds recordings."
        raise ConfigError("view", [Problem(where=str(directory), what=what, fix=fix)])
    try:
        viewer = Viewer(directory, port=port)
    except OSError as error:
        fix = "Give another port, or --port 0 for any that is free."
        problem = Problem(where=f"--port {port}", what=f"cannot be used: {error.strerror}.", fix=fix)
        raise ConfigError("view", [problem]) from None
    messages.print(f"traindiff: {viewer.address} shows the recordings under {directory}", markup=False, soft_wrap=True)
    if browse:
        import webbrowser

        webbrowser.open(viewer.address)
    try:
        viewer.serve()
    except KeyboardInterrupt:
        messages.print("traindiff: stopped")
    finally:
        viewer.close()
