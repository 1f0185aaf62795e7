"""Commands that a launcher has started on several ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import typer

from traindiff.cli.app import says_what_is_wrong

if TYPE_CHECKING:
    from traindiff.launching.present_ranks import PresentRanks

_LAST_SECONDS = 1.0
"""torchrun ends the others as soon as one rank fails, so that rank 0 should be the first."""


def on_rank_0(command: Callable[[PresentRanks | None], int]) -> int:
    """The exit code of a command that rank 0 runs, while other ranks run what it launches.

    Args:
        command: Is given the ranks that are there already, None without a launcher. Prints, and returns an exit code.
    """
    from traindiff.launching.present_ranks import PresentRanks

    ranks = PresentRanks.found()
    if ranks is None:
        return command(None)
    code = ranks.together(lambda: _exit_code(lambda: command(ranks)))
    if code and not ranks.leads:
        time.sleep(_LAST_SECONDS)
    return code


def _exit_code(command: Callable[[], int]) -> int:
    """What the command returns, or exits with."""
    try:
        code: int = says_what_is_wrong(command)()
    except typer.Exit as ends:
        return ends.exit_code
    return code
