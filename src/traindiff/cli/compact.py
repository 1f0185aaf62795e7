"""`traindiff compact` and `traindiff prune`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from traindiff.cli.app import app, messages, results, says_what_is_wrong
from traindiff.cli.following import follower
from traindiff.cli.options import SHOWN, FollowOption, PatienceOption, RecordingArgument, WorkersOption
from traindiff.cli.progress import step_progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from traindiff.analyse.compact import Compacted
    from traindiff.storage import Follower

WholeEveryOption = Annotated[
    int | None,
    typer.Option("--whole-every", metavar="N", rich_help_panel=SHOWN, help="Keep every N-th step rank by rank."),
]


@app.command(short_help="Merge the ranks of a recording once, into a smaller recording.")
@says_what_is_wrong
def compact(
    context: typer.Context,
    recording: RecordingArgument,
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
    whole_every: WholeEveryOption = None,
    workers: WorkersOption = None,
    follow: FollowOption = False,
    patience: PatienceOption = 600.0,
) -> None:
    """Merge the ranks of a recording once, into a smaller one with the same verdicts (traindiff explain scale.md).

    The recording that is read stays as it is.
    """
    from traindiff.analyse.compact.compacting import compact as compacted
    from traindiff.analyse.compact.compacting import default_output

    make = partial(compacted, recording, output or default_output(recording))
    _print_made(make, recording, whole_every, workers, follower(context, follow, patience))


@app.command(short_help="Replace a recording by its compact form.")
@says_what_is_wrong
def prune(
    context: typer.Context,
    recording: Annotated[str, typer.Argument(metavar="RECORDING", help="Recording to replace: a local directory.")],
    whole_every: WholeEveryOption = None,
    workers: WorkersOption = None,
    follow: FollowOption = False,
    patience: PatienceOption = 600.0,
) -> None:
    """Replace a recording by its compact form, after both have passed the same check (traindiff explain scale.md).

    What single ranks had recorded is removed, except for the steps that --whole-every keeps.
    """
    from traindiff.analyse.compact.pruning import prune as pruned

    _print_made(partial(pruned, recording), recording, whole_every, workers, follower(context, follow, patience))


class _Makes(Protocol):
    """Makes a compact recording."""

    def __call__(
        self,
        *,
        whole_every: int | None,
        workers: str | None,
        follow: Follower | None,
        progress: Callable[[int], None],
    ) -> Compacted:
        """As `compact` does."""


def _print_made(
    make: _Makes, recording: str, whole_every: int | None, workers: str | None, follow: Follower | None
) -> None:
    """Make a compact recording, and say what it is."""
    with step_progress(messages, "compacting", (recording,), endless=follow is not None) as on_step:
        made = make(whole_every=whole_every, workers=workers, follow=follow, progress=on_step)
    results.print(str(made), markup=False, soft_wrap=True)
