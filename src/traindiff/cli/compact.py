"""`traindiff compact` and `traindiff prune`."""

from __future__ import annotations

from typing import Annotated

import typer

from traindiff.cli.app import app, messages, results, says_what_is_wrong
from traindiff.cli.options import SHOWN, RecordingArgument
from traindiff.cli.progress import step_progress

WholeEveryOption = Annotated[
    int | None,
    typer.Option("--whole-every", metavar="N", rich_help_panel=SHOWN, help="Keep every N-th step rank by rank."),
]


@app.command(short_help="Merge the ranks of a recording once, into a smaller recording.")
@says_what_is_wrong
def compact(
    recording: RecordingArgument,
    whole_every: WholeEveryOption = None,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="DIRECTORY",
            rich_help_panel=SHOWN,
            help="Recording to make. RECORDING-compact, if left out.",
        ),
    ] = "",
) -> None:
    """Merge the ranks of a recording once, into a smaller recording with the same verdicts (traindiff explain scale).

    The recording that is read stays as it is.
    """
    from traindiff.analyse.compact.compacting import compact as compacted

    target = output or f"{recording.rstrip('/')}-compact"
    with step_progress(messages, "compacting", (recording,)) as on_step:
        made = compacted(recording, target, whole_every=whole_every, progress=on_step)
    results.print(str(made), markup=False, soft_wrap=True)


@app.command(short_help="Replace a recording by its compact form.")
@says_what_is_wrong
def prune(
    recording: Annotated[str, typer.Argument(metavar="RECORDING", help="Recording to replace: a local directory.")],
    whole_every: WholeEveryOption = None,
) -> None:
    """Replace a recording by its compact form, after both have passed the same check (traindiff explain scale).

    What single ranks had recorded is removed, except for the steps that --whole-every keeps.
    """
    from traindiff.analyse.compact.pruning import prune as pruned

    with step_progress(messages, "compacting", (recording,)) as on_step:
        made = pruned(recording, whole_every=whole_every, progress=on_step)
    results.print(str(made), markup=False, soft_wrap=True)
