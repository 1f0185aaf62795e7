"""Merge the ranks of a recording beside the training, by a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from traindiff.core.settings import RecordSettings
from traindiff.core.untrusted.local_files import local_path
from traindiff.errors import ConfigError, Problem

_OF_RANKS = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE|WORLD_RANK|NAME)|MASTER_.*|TORCHELASTIC_.*|OMPI_.*|PMI_.*"
)
"""Variables by which a launcher tells a process that it is a rank."""

_NICE = 10
"""How much later than the training the process gets its turn."""

_processes: list[subprocess.Popen[bytes]] = []
"""The processes that this one has started; they may outlive it."""


def check_compacting(path: str, settings: RecordSettings) -> None:
    """Refuse what cannot be merged beside the training.

    Raises:
        ConfigError: The recording is not on this machine, or holds more than summaries.
    """
    if settings.compact is None:
        return
    problems = []
    if local_path(path) is None:
        fix = "Leave compact out, and run traindiff compact --follow URL -o DIRECTORY on some machine."
        problems.append(Problem(where=f"record(path={path!r}, compact=...)", what="is no local directory.", fix=fix))
    if more := sorted(settings.detail - {"summary"}):
        what = f"are files of single ranks ({', '.join(more)}), which cannot be merged."
        problems.append(Problem(where="record(detail=..., compact=...)", what=what, fix="Leave one of the two out."))
    if problems:
        raise ConfigError("record(...)", problems, consequence="nothing was attached to the model")


def compact_beside(path: str, whole_every: int) -> None:
    """Start the process that replaces a recording by its compact form when all ranks have closed it.

    What it says is added to the file `PATH-compact.log`. It outlives the training, whose signals do not reach it.

    Args:
        path: Directory of the recording, which has begun.
        whole_every: Keep every n-th step rank by rank; 0 for none.
    """
    directory = Path(local_path(path) or path)
    every = ("--whole-every", str(whole_every)) if whole_every else ()
    with directory.with_name(f"{directory.name}-compact.log").open("ab") as log:
        log.write(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC: {directory} is compacted when it has ended.\n".encode())
        log.flush()
        process = subprocess.Popen(
            [sys.executable, "-m", "traindiff", "prune", "--follow", str(directory), *every],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=_alone(os.environ),
        )  # fmt: skip
    _processes.append(process)
    if hasattr(os, "setpriority"):
        os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)


def _alone(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that is no rank, has one thread, and sees no GPU."""
    kept = {name: value for name, value in environment.items() if not _OF_RANKS.fullmatch(name)}
    return {**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"}
