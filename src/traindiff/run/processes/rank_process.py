"""The code that a launched process runs: it becomes a rank, calls the function, and sends the launcher the outcome."""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from traindiff.core.observation import Observation
from traindiff.core.site import label
from traindiff.errors import ConfigError

BYTES = 512
"""Size of the file. Longer text is cut off."""


class LastSeen:
    """Keeps the last observation in a file that is mapped into memory.

    The system has the bytes as soon as they are assigned, so they survive any end of the process. One observation costs
    about a microsecond.

    Args:
        path: The file; replaced.
    """

    def __init__(self, path: Path) -> None:
        path.write_bytes(b" " * BYTES)
        self._count = 0
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), BYTES)

    def __call__(self, seen: Observation) -> None:
        """Keep this observation."""
        self._count += 1
        self._memory[:] = f"{self._count} {seen_text(seen)}".encode()[:BYTES].ljust(BYTES)


def seen_text(seen: Observation) -> str:
    """An observation in a few words."""
    return f"step {seen.step}, micro-step {seen.micro_step}, {seen.phase}, {label(seen.path, seen.slot)}"


def read_last_seen(path: Path) -> tuple[int, str]:
    """The number of observations, and the last one in a few words; 0 and an empty text if there was none."""
    text = path.read_bytes().decode(errors="replace").strip() if path.exists() else ""
    count, _, last = text.partition(" ")
    return (int(count), last) if last else (0, "")


FOR_EVER = timedelta(days=1)
"""How long ranks wait for each other. The launcher is less patient, and knows better which rank hangs."""


def connected(store: str, world_size: int) -> Any:
    """A connection to torch's store at `file:///PATH`, or at `tcp://HOST:PORT/PREFIX` for a part of the store there."""
    stores: Any = distributed  # its exports are not typed
    kind, _, where = store.partition("://")
    if kind == "file":
        file = stores.FileStore(where, world_size)
        file.set_timeout(FOR_EVER)
        return file
    address, _, prefix = where.partition("/")
    host, _, port = address.rpartition(":")
    return stores.PrefixStore(prefix, stores.TCPStore(host, int(port), is_master=False, timeout=FOR_EVER))


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The rank that a process becomes.

    Attributes:
        rank: Among all ranks.
        local_rank: Among the ranks of this machine.
        world_size: Number of ranks.
        store: Where ranks find each other, `file:///PATH` or `tcp://HOST:PORT/PREFIX`; None without a process group.
        environment: All environment variables.
        directory: Working directory.
        threads: Threads for computing.
        output: File for the process's output.
        stack: File for its stacks.
        last_seen: File for its last observation.
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
    """The place of a rank, with the environment that torchrun sets if the ranks have a process group.

    `master` is address and port for that environment. Only the launcher reads the files in `scratch`.
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
"""Environment variables that tell a process that it is a rank."""


class Here:
    """The first argument of a launched function.

    Attributes:
        rank: This rank.
        last_seen: To be called with each observation.
    """

    def __init__(self, place: Place, connection: Connection) -> None:
        self.rank = place.rank
        self.last_seen = LastSeen(place.last_seen)
        self._connection = connection

    def step_done(self, number: int) -> None:
        """Tell the launcher that a step has ended."""
        self._connection.send({"step": number})


Launched = Callable[..., Any]
"""Called as `function(here, *args)` on each rank; returns JSON values."""


def rank_main(place: Place, function: Launched, args: Sequence[Any], connection: Connection) -> None:
    """Become the rank, and call the function."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher is interrupted too, and ends this process
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
            result = function(Here(place, connection), *args)
            connection.send({"result": result, "at": time.monotonic()})
        except BaseException as error:  # noqa: BLE001  also KeyboardInterrupt and SystemExit are told
            # The launcher may hear this late. The rank that raised first explains the others.
            at = time.monotonic()
            sys.stdout.flush()
            connection.send({"raised": _told(error), "printed_bytes": os.fstat(1).st_size, "at": at})
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # without waiting for ranks that wait for this one
        if place.store is not None:
            distributed.destroy_process_group()
        faulthandler.disable()
        if hasattr(faulthandler, "unregister"):
            faulthandler.unregister(signal.SIGUSR1)


def _join(place: Place) -> None:
    """Initialize the process group of all ranks."""
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
    """An exception, as the launcher is told of it."""
    cause = (error.__cause__ or error) if isinstance(error, ConfigError) else error
    return {
        "explained": cause is not error,
        "message": f"{type(cause).__name__}: {cause}",
        "stack": "".join(traceback.format_exception(cause)),
        "problems": error.problems if isinstance(error, ConfigError) else (),
    }


def _end_with_the_launcher(connection: Connection) -> None:
    """End this process when the launcher ends: nothing is ever sent here, so data means the end of the connection."""
    try:
        connection.poll(None)
    except OSError:
        return
    try:
        connection.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)


def _print_into(path: Path) -> None:
    """Redirect all output of this process into a file, also that of libraries which bypass Python."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
