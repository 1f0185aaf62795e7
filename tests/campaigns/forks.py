"""Trainings in forks of one process that has imported torch, so that hundreds of them take minutes.

A fork is sound where no thread runs but the one that forks: `forked` looks, and refuses otherwise. So whatever may
start threads, readers among them, runs in forks too.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # a thread that importing pyarrow would start
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # threads that importing numpy would start

import torch
from torch import distributed, nn

import traindiff

torch.set_num_threads(1)
NO_ERROR = 0
_PR_SET_PDEATHSIG = 1
TRACEBACK = 70


def forked(function: Callable[[], int | None], *, output: Path | None = None) -> int:
    """Call a function in a fork of this process; gives the fork's id. What it returns is the exit status.

    Args:
        function: What to call.
        output: Where what it prints goes.
    """
    assert len(os.listdir("/proc/self/task")) == 1, "a thread runs in the parent"  # noqa: PTH208
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    status = TRACEBACK
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no training outlives the campaign
        if output is not None:
            fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(fd, 1)
            os.dup2(fd, 2)
        status = function() or NO_ERROR
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001  it must not go on as the parent
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def import_as(function: Callable[[], int | None], here: Path) -> None:
    """Call a function in a fork, and import here what it has imported there, so that later forks need not."""
    names = here / "modules.txt"

    def call() -> int:
        status = function() or NO_ERROR
        names.write_text("\n".join(sys.modules))
        return status

    assert ended(forked(call, output=here / "warming.log")) == NO_ERROR, (here / "warming.log").read_text()
    for name in names.read_text().split():
        if name not in sys.modules and name.split(".")[0] in ("torch", "traindiff", "pyarrow", "numpy", "rich"):
            with suppress(ImportError):
                import_module(name)


def ended(pid: int) -> int:
    """Wait for a fork; its exit status, or the number of the signal that killed it, negative."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def small_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, the same each time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(
    run: Path, report: int, *, rank: int = 0, ranks: int = 1, distributes: bool = False, steps: int = 1_000_000
) -> None:
    """Train until killed; writes the number of each step to `report` when `optimizer.step()` has returned.

    A number is followed by `*` where that call took so long that the step may wait in memory: see
    `traindiff.observe.common.writing.PROMPT_SECONDS`.
    """
    model, optimizer = small_model()
    if ranks > 1 or distributes:
        store = distributed.FileStore(f"{run}.store", ranks)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        model = nn.parallel.DistributedDataParallel(model)
    with traindiff.record(run, model, optimizer):
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 16)).square().mean().backward()
            began = time.monotonic()
            optimizer.step()
            late = "*" if time.monotonic() - began > 0.2 else ""
            os.write(report, f"{step}{late}\n".encode())


def read(arguments: Sequence[str]) -> int:
    """What a command exits with."""
    from traindiff.cli import main

    sys.argv = ["traindiff", *arguments]
    try:
        result: Any = main()
    except SystemExit as error:
        result = error.code
    return int(result or 0)
