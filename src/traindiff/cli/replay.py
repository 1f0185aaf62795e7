"""`traindiff replay`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from traindiff.cli.app import app, messages, results, says_what_is_wrong


@app.command(short_help="Run again a module that made NaN or infinity, in longer dtypes.")
@says_what_is_wrong
def replay(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="What traindiff.watch has saved.")],
    device: Annotated[str, typer.Option(help='Where to run it, e.g. "cuda".')] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="For programs (docs/watch.md).")] = False,
) -> None:
    """Run the operators of one module's call again, in its own dtypes, in float32 and in float64.

    Exits with 0 if the overflow is the dtype's, 1 if the mathematics is not finite, 2 if the input cannot be used, and
    3 if nothing that is not finite came out again.
    """
    from traindiff.watching.replaying import replay as replay_directory
    from traindiff.watching.replaying import table

    with messages.status("running"):
        found = replay_directory(directory, device=device)
    if as_json:
        results.print(json.dumps(found.to_json(), indent=2), markup=False, soft_wrap=True)
    else:
        results.print("\n".join(table(found)), markup=False, soft_wrap=True)
    raise typer.Exit(found.exit_code)
