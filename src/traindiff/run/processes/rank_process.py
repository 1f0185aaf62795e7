"""What a launched process does: become a rank, call the function, tell the process that launched it how it went."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from traindiff.errors import ConfigError
from traindiff.run.processes.rank_end import LastSeen

FOR_EVER = timedelta(days=1)
"""Ranks wait for each other so long: whoever launched them is less patient, and knows better what hangs."""


def connected(store: str, world_size: int) -> Any:
    """A store of torch's.

    Args:
        store: `file:///PATH`, or `tcp://HOST:PORT/PREFIX` for a part of the store that listens there.
        world_size: Number of ranks.
    """
    stores: Any = distributed  # its exports are not typed
    kind, _, where = store.partition("://")
    if kind == "file":
        return stores.FileStore(where, world_size)
    address, _, prefix = where.partition("/")
    host, _, port = address.rpartition(":")
    return stores.PrefixStore(prefix, stores.TCPStore(host, int(port), is_master=False, timeout=FOR_EVER))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which rank a process becomes.

    Attributes:
        rank: Among all.
        local_rank: Among those of this machine.
        world_size: Number of ranks.
        store: Where ranks find each other, `file:///PATH` or `tcp://HOST:PORT/PREFIX`; None without a process group.
        environment: Environment variables, all of them.
        directory: Working directory.
        threads: Threads for computing.
        output: File for what the process prints.
        stack: File for its stacks.
        last_seen: File for what it observed last.
    """

    rank: int
    local_rank: int
    world_size: int
    store: str | None
    environment: Mapping[str, str]
    directory: str
    threads: int
    output: Path
    stack: Path
    last_seen: Path


class Here:
    """What a launched function is given first.

    Args:
        place: Which rank this is.
        connection: To the process that launched it.

    Attributes:
        rank: This rank.
        last_seen: To be called with each observation.
    """

    def __init__(self, place: Place, connection: Connection) -> None:
        self.rank = place.rank
        self.last_seen = LastSeen(place.last_seen)
        self._connection = connection

    def step_done(self, number: int) -> None:
        """Say that a step has ended."""
        self._connection.send({"step": number})


Launched = Callable[..., Any]
"""Called as `function(here, *args)` on each rank; gives JSON values."""


def rank_main(place: Place, function: Launched, args: Sequence[Any], connection: Connection) -> None:
    """Become the rank, and call the function."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who launched this is interrupted too, and ends it
    threading.Thread(target=_end_with_the_launcher, args=(connection,), daemon=True).start()
    _print_into(place.output)
    os.chdir(place.directory)
    with place.stack.open("w") as stack:
        faulthandler.enable(file=stack)
        if hasattr(faulthandler, "register"):
            faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        os.environ.clear()
        os.environ.update(place.environment)
        torch.set_num_threads(place.threads)
        try:
            if place.store is not None:
                _join(place)
            connection.send({"result": function(Here(place, connection), *args)})
        except BaseException as error:  # noqa: BLE001  also KeyboardInterrupt and SystemExit are told
            sys.stdout.flush()
            connection.send({"raised": _told(error), "printed_bytes": os.fstat(1).st_size})
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # without waiting for ranks that wait for this one
        if place.store is not None:
            distributed.destroy_process_group()
        faulthandler.disable()
        if hasattr(faulthandler, "unregister"):
            faulthandler.unregister(signal.SIGUSR1)


def _join(place: Place) -> None:
    """Make the process group of all ranks."""
    assert place.store is not None
    backend = "gloo"
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    distributed.init_process_group(
        backend, store=connected(place.store, place.world_size), rank=place.rank, world_size=place.world_size,
        timeout=FOR_EVER,
    )  # fmt: skip


def _told(error: BaseException) -> dict[str, Any]:
    """An exception, as the process that launched this one is told of it."""
    problems: list[dict[str, str]] = []
    cause = error
    if isinstance(error, ConfigError):
        problems = [{"where": one.where, "what": one.what, "fix": one.fix} for one in error.problems]
        cause = error.__cause__ or error
    return {
        "explained": cause is not error,
        "message": f"{type(cause).__name__}: {cause}",
        "stack": "".join(traceback.format_exception(cause)),
        "problems": problems,
    }


def _end_with_the_launcher(connection: Connection) -> None:
    """Nothing is ever sent here: what can be read is the end of the process at the other end."""
    try:
        connection.poll(None)
    except OSError:
        return
    try:
        connection.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)


def _print_into(path: Path) -> None:
    """Have all that this process prints in a file, also what libraries print past Python."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
