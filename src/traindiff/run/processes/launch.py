"""Launch a function on fresh processes of this machine, one per rank."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from traindiff.run.processes.processes import OnStep, RankProcesses
from traindiff.run.processes.rank_end import Patience, RankEnd, RanksError
from traindiff.run.processes.rank_process import Launched, Place


def launch(
    function: Launched,
    *args: Any,
    world_size: int,
    grouped: bool = True,
    outputs: Path,
    patience: Patience | None = None,
    threads: int | None = None,
    on_step: OnStep | None = None,
) -> list[RankEnd]:
    """Call `function(here, *args)` in `world_size` fresh processes; no process is left when this returns or raises.

    Args:
        function: Can be imported by name; gives JSON values. What it is given first is a `Here`.
        *args: For every rank; must be picklable.
        world_size: Number of ranks.
        grouped: Have an initialized process group, and the environment that torchrun sets.
        outputs: Directory for what ranks print, `rank-0.txt` and so on.
        patience: How long they may take.
        threads: For computing, in each process. Default: those of this process, divided among ranks.
        on_step: Called with rank and number of each step.

    Returns:
        How each rank ended, in order. All of them returned.

    Raises:
        RanksError: A rank raised, died, or did not end a step in time. The others were ended too.
    """
    with tempfile.TemporaryDirectory(prefix="traindiff-ranks-") as name:
        directory = Path(name)
        places = [
            place_of(
                rank, world_size, local_rank=rank, store=f"file://{directory / 'store'}" if grouped else None,
                master=("127.0.0.1", _free_port()) if grouped else None, outputs=outputs, scratch=directory,
                threads=threads or max(1, torch.get_num_threads() // world_size),
            )
            for rank in range(world_size)
        ]  # fmt: skip
        with RankProcesses(places, function, args, patience=patience or Patience(), on_step=on_step) as processes:
            ends = processes.ends()
    return all_returned(ends)


def all_returned(ends: Sequence[RankEnd]) -> list[RankEnd]:
    """The same, in the order of ranks.

    Raises:
        RanksError: Not all of them returned.
    """
    if any(end.how != "returned" for end in ends):
        raise RanksError(ends)
    return sorted(ends, key=lambda end: end.rank)


def place_of(
    rank: int,
    world_size: int,
    *,
    local_rank: int,
    store: str | None,
    master: tuple[str, int] | None,
    outputs: Path,
    scratch: Path,
    threads: int,
) -> Place:
    """The place of a rank, with the environment that torchrun sets where there is a process group.

    Args:
        rank: Among all.
        world_size: Number of ranks.
        local_rank: Among those of this machine.
        store: See `Place`.
        master: Address and port for the environment.
        outputs: Directory for what ranks print.
        scratch: Directory for what only the launcher reads.
        threads: See `Place`.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
    if master is not None:
        environment |= {
            "RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": master[0], "MASTER_PORT": str(master[1]),
        }  # fmt: skip
    return Place(
        rank=rank, local_rank=local_rank, world_size=world_size, store=store, environment=environment,
        directory=str(Path.cwd()),
        threads=threads, output=outputs / f"rank-{rank}.txt", stack=scratch / f"stack-{rank}.txt",
        last_seen=scratch / f"last-seen-{rank}",
    )  # fmt: skip


_OF_A_RANK = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE",
     "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"}
)  # fmt: skip
"""Environment variables by which a process knows that it is a rank."""


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
