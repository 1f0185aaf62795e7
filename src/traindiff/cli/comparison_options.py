"""The options of commands that compare two recordings: `traindiff compare` and `traindiff report`."""

from __future__ import annotations

from typing import Annotated

import typer

NoiseOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RECORDING",
        help="Recording of a replica of the baseline, or of the baseline run again, to measure floors from. "
        "Repeatable.",
    ),
]
RenameOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN=REPLACEMENT",
        help="Regular expression that turns the candidate's paths into the baseline's. Repeatable.",
    ),
]
