"""The option of commands that read recordings by several processes."""

from __future__ import annotations

from typing import Annotated

import typer

WorkersOption = Annotated[
    str | None,
    typer.Option(
        "--workers",
        metavar="N|ray",
        help="Read by N processes of this machine, or by a Ray cluster: the same result (traindiff explain scale).",
    ),
]
