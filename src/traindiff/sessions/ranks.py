"""Run a function on several ranks of one machine, and say which rank does what when it fails or hangs."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import distributed

TIMEOUT_SECONDS = 120.0
"""How long all ranks together may take."""

_GRACE_SECONDS = 5.0
"""How long a rank has to write its stack, or to end after another has failed."""


class RanksError(RuntimeError):
    """A rank failed, or did not end in time; the message has the error or the stack of each rank."""


def run_on_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_seconds: float = TIMEOUT_SECONDS,
    backend: str = "gloo",
) -> list[Any]:
    """Call `function(*args)` in `world_size` processes with an initialised process group.

    Each process has one thread for computing, and `RANK`, `LOCAL_RANK` and `WORLD_SIZE` set as torchrun sets them.

    Args:
        function: Can be imported by name; is called on every rank.
        world_size: Number of ranks.
        *args: For every rank; must be picklable.
        timeout_seconds: After so long every rank writes its stack and is ended.
        backend: Of the process group.

    Returns:
        What each rank returned, as JSON values, in the order of ranks.

    Raises:
        RanksError: A rank raised, died, or did not end in time.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "traindiff.sessions.ranks"])
    with tempfile.TemporaryDirectory(prefix="traindiff-ranks-") as name:
        directory = Path(name)
        processes = [
            context.Process(
                target=_rank_main,
                args=(function, rank, world_size, args, str(directory), backend, timeout_seconds),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        failed = _wait(processes, timeout_seconds)
        if failed:
            raise RanksError(_report(directory, processes, failed))
        return [json.loads((directory / f"result-{rank}.json").read_text()) for rank in range(world_size)]


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    args: Sequence[Any],
    directory: str,
    backend: str,
    timeout_seconds: float,
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    here = Path(directory)
    with (here / f"stack-{rank}.txt").open("w") as stack:
        faulthandler.dump_traceback_later(timeout_seconds, file=stack)
        try:
            distributed.init_process_group(
                backend,
                init_method=f"file://{here / 'store'}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=max(10.0, 2 * timeout_seconds)),
            )
            result = function(*args)
            (here / f"result-{rank}.json").write_text(json.dumps(result))
        except BaseException:  # noqa: BLE001  also KeyboardInterrupt and SystemExit are told
            (here / f"error-{rank}.txt").write_text(traceback.format_exc())
            raise SystemExit(1) from None  # without waiting for ranks that wait for this one
        finally:
            faulthandler.cancel_dump_traceback_later()
        distributed.destroy_process_group()


def _wait(processes: Sequence[BaseProcess], timeout_seconds: float) -> str:
    """Wait for all ranks; what went wrong in a few words, or nothing."""
    deadline = time.monotonic() + timeout_seconds + _GRACE_SECONDS
    failed_at: float | None = None
    failed = ""
    while any(process.is_alive() for process in processes):
        now = time.monotonic()
        if failed_at is None and any(process.exitcode not in (None, 0) for process in processes):
            failed, failed_at = "failed", now
        if now > deadline:
            failed = failed or f"did not end in {timeout_seconds:g} seconds"
            break
        if failed_at is not None and now > failed_at + _GRACE_SECONDS:
            break
        time.sleep(0.02)
    for process in processes:
        if process.is_alive():
            process.terminate()
            process.join(_GRACE_SECONDS)
            if process.is_alive():
                process.kill()
    if not failed and any(process.exitcode != 0 for process in processes):
        failed = "failed"
    return failed


def _report(directory: Path, processes: Sequence[BaseProcess], failed: str) -> str:
    lines = [f"A function on {len(processes)} ranks {failed}."]
    for rank, process in enumerate(processes):
        error, stack = directory / f"error-{rank}.txt", directory / f"stack-{rank}.txt"
        if error.exists():
            lines += [f"Rank {rank} raised:", error.read_text().rstrip()]
        elif stack.exists() and stack.read_text().strip():
            lines += [f"Rank {rank} was here:", stack.read_text().rstrip()]
        elif (directory / f"result-{rank}.json").exists():
            lines.append(f"Rank {rank} returned.")
        else:
            lines.append(f"Rank {rank} was ended (exit code {process.exitcode}); it was waiting, or died.")
    return "\n".join(lines)
