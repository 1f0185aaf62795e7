"""Run a saved call again in a process of its own, which is ended when it takes too long or too much memory.

The operators of a saved call are checked before they run, but their sizes are a stranger's: ten operators can ask for
any amount of memory and time, and a fault of an operator ends the process that runs it.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traindiff import errors
from traindiff.core.site import printable
from traindiff.errors import RecordingError, TraindiffError

SECONDS = 300
"""How long a replay may take where nothing else is asked for."""

GIB = 4
"""Memory that a replay may take where nothing else is asked for, or 64 times its file of tensors if that is more."""

REPORT = "\x1etraindiff-replay:"
"""Before the report on the standard output of the process. JSON escapes control characters, so that no name in the
report can be taken for this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a replay has found.

    Attributes:
        exit_code: Of the command.
        lines: For people.
        content: For programs, as `--json` prints it.
    """

    exit_code: int
    lines: list[str]
    content: dict[str, Any]


def replay_contained(directory: Path, *, device: str = "cpu", seconds: float = SECONDS, gib: float = GIB) -> Report:
    """Run a call that `traindiff.watch` has saved again, in a process of its own.

    Args:
        directory: Where it was saved.
        device: Where to run it.
        seconds: How long it may take.
        gib: How much memory it may take. On Linux, and on the CPU alone: elsewhere nothing limits it.

    Raises:
        RecordingError: It cannot be used, takes longer or needs more memory, or ends the process.
        ConfigError: There is no such device.
    """
    command = (
        sys.executable,
        "-P",
        "-m",
        "traindiff.observe.torch.nonfinite.contained_replay",
        str(directory),
        device,
        str(gib),
    )
    shown = printable(str(directory))
    try:
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise RecordingError(
            f"{shown} took longer than {seconds:g} seconds to run again. If it is your own, --seconds allows more; "
            "if it is somebody else's, do not trust it."
        ) from None
    _, found, report = ended.stdout.decode("utf-8", "replace").rpartition(REPORT)
    if ended.returncode or not found:
        raise RecordingError(
            f"{shown} could not be run again: the process that ran it {_ending(ended.returncode)}. If it is your own, "
            "watch the training again; if it is somebody else's, do not trust it."
        )
    content = json.loads(report)
    if "missing" in content:
        raise ModuleNotFoundError(f"No module named {content['missing']!r}", name=content["missing"])
    if "error" in content:
        raise _error(content["error"], content["message"])
    return Report(exit_code=content["exit_code"], lines=content["lines"], content=content["content"])


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code} and without a report"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _error(name: str, message: str) -> TraindiffError:
    kind = getattr(errors, name) if name in ("NotARecordingError", "CorruptRecordingError") else RecordingError
    error: TraindiffError = kind(message)
    return error
