"""`traindiff mcp`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from traindiff.cli.app import app, says_what_is_wrong


@app.command(short_help="Serve recordings to coding agents, over the Model Context Protocol.")
@says_what_is_wrong
def mcp(
    directory: Annotated[
        Path, typer.Argument(metavar="DIRECTORY", help="Directory of the recordings. Nothing outside it is read.")
    ] = Path(),
    run: Annotated[
        bool,
        typer.Option("--run", help="Let the tool investigate run trainings of files in DIRECTORY: their code, as you."),
    ] = False,
) -> None:
    """Serve recordings to coding agents on standard input and output: recordings, compare, check, show, explain.

    Nothing is written to DIRECTORY. `traindiff explain agents` says how to register the server.
    """
    from traindiff.run.agents.server import server

    server(directory, may_run=run).run("stdio")
