"""Run a function on several ranks of one machine, and say which rank does what when it fails or hangs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from traindiff.run.processes.launch import launch
from traindiff.run.processes.rank_end import Patience, RanksError
from traindiff.run.processes.rank_process import Here

__all__ = ["TIMEOUT_SECONDS", "RanksError", "run_on_ranks"]

TIMEOUT_SECONDS = 120.0
"""How long all ranks together may take."""


def run_on_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = TIMEOUT_SECONDS
) -> list[Any]:
    """Call `function(*args)` in `world_size` processes with an initialized process group.

    Each process has one thread for computing, and `RANK`, `LOCAL_RANK` and `WORLD_SIZE` set as torchrun sets them.

    Args:
        function: Can be imported by name; is called on every rank.
        world_size: Number of ranks.
        *args: For every rank; must be picklable.
        timeout_seconds: After so long every rank writes its stack and is ended.

    Returns:
        What each rank returned, as JSON values, in the order of ranks.

    Raises:
        RanksError: A rank raised, died, or did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="traindiff-outputs-") as outputs:
        ends = launch(
            _call, function, args, world_size=world_size, outputs=Path(outputs), threads=1,
            patience=Patience(seconds=timeout_seconds),
        )  # fmt: skip
    return [end.result for end in ends]


def _call(_here: Here, function: Callable[..., Any], args: Sequence[Any]) -> Any:
    return function(*args)
