"""Run a saved call again in a process of its own, which is ended when it takes too long or too much memory.

The operators of a saved call are checked before they run, but their sizes are a stranger's: ten operators can ask for
any amount of memory and time, and a fault of an operator ends the process that runs it. That process runs this file as
a program: it runs one saved call again and prints the report as JSON.
"""

from __future__ import annotations

import json
import os
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
"""How long a rerun may take by default."""

GIB = 4
"""Memory that a rerun may take by default, or 64 times its file of tensors if that is more."""

_TIMES_THE_TENSORS = 64
_NO_MEMORY = ("allocate memory", "out of memory", "MemoryError", "bad_alloc", "std::bad_array_new_length")

REPORT = "\x1etraindiff-rerun:"
"""Before the report on the standard output of the process. JSON escapes control characters, so that no name in the
report can be taken for this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The result of a rerun.

    Attributes:
        exit_code: Of the command.
        lines: For people.
        content: For programs, as `--json` prints it.
    """

    exit_code: int
    lines: list[str]
    content: dict[str, Any]


def find_cause_contained(directory: Path, *, device: str = "cpu", seconds: float = SECONDS, gib: float = GIB) -> Report:
    """Rerun a call that `traindiff.watch` saved, in a separate process.

    Args:
        directory: Where it was saved.
        device: Where to run it.
        seconds: How long it may take.
        gib: How much memory it may take. The limit works only under Linux and on the CPU.

    Raises:
        RecordingError: It cannot be used, takes longer or needs more memory, or ends the process.
        ConfigError: There is no such device.
    """
    command = (sys.executable, "-P", "-m", __name__, str(directory), device, str(gib))
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


def main(directory: str, device: str, gib: str) -> dict[str, Any]:
    """The result of the process, or the reason why there is none."""
    try:
        import torch
    except ModuleNotFoundError as error:
        return {"missing": error.name}
    from traindiff.observe.torch.nonfinite.cause import find_cause, table
    from traindiff.observe.torch.nonfinite.saved_call import TENSORS_FILE

    try:
        _check_device(torch, device)
        limit = _limit_memory(Path(directory) / TENSORS_FILE, float(gib)) if device == "cpu" else None
        try:
            found = find_cause(Path(directory), device=device)
            failed = " ".join(run.failed for run in found.runs().values())
        except (TraindiffError, OSError):
            raise
        except Exception as error:  # noqa: BLE001  tensors of a stranger may have any shapes and dtypes
            failed, found = f"{type(error).__name__}: {error}", None
        if found is None or any(one in failed for one in _NO_MEMORY):
            raise RecordingError(_unfinished(directory, failed, limit))
    except (TraindiffError, OSError) as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"exit_code": found.exit_code, "lines": table(found), "content": found.to_json()}


def _check_device(torch: Any, device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError, NotImplementedError):
        raise RecordingError(
            f'--device "{printable(device)}" is no device that torch can use here. Leave it out to use the CPU.'
        ) from None


def _unfinished(directory: str, failed: str, limit: float | None) -> str:
    shown = printable(directory)
    if any(one in failed for one in _NO_MEMORY):
        allowed = "there is" if limit is None else f"the {limit:.3g} GiB that it may have"
        return (
            f"{shown} needs more memory than {allowed}. If it is your own, --memory allows more; if it is somebody "
            "else's, do not trust it."
        )
    return f"{shown} could not be run again ({printable(failed)}). Watch the training again."


def _limit_memory(tensors: Path, gib: float) -> float | None:
    """Limit what the process allocates from here on, and keep it from writing files; gives the limit in GiB.

    Linux counts private writable memory; what torch itself has already taken is not counted against the limit.
    """
    try:
        import resource

        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        taken = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmData:"))
    except (ImportError, OSError, StopIteration):
        return None
    try:
        size = os.stat(tensors).st_size  # noqa: PTH116
    except OSError:
        size = 0
    allowed = max(int(gib * 2**30), _TIMES_THE_TENSORS * size)
    for kind, value in (
        (resource.RLIMIT_DATA, min(taken + allowed, 2**62)), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0),
    ):  # fmt: skip
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
    return allowed / 2**30


if __name__ == "__main__":
    report = json.dumps(main(*sys.argv[1:]))
    sys.stdout.write(REPORT + report)
