"""Commands that a launcher has started on several ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import typer

from traindiff.cli.app import UNUSABLE
from traindiff.errors import TraindiffError


def rank_and_world_size() -> tuple[int, int | None]:
    """This process's rank, and how many a launcher has started; 0 and None where none has."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    return (int(os.environ.get("RANK", "0")), count) if count > 1 else (0, None)


def only_rank_0_speaks(command: Callable[..., Any]) -> Callable[..., Any]:
    """On other ranks, exit with 2 where the command cannot do what it was asked for, and leave saying so to rank 0."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except TraindiffError:
            if rank_and_world_size()[0] == 0:
                raise
            raise typer.Exit(UNUSABLE) from None

    return run
