"""The process that `contained` starts: replays one directory and prints the report as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from traindiff.core.site import printable
from traindiff.errors import RecordingError, TraindiffError
from traindiff.observe.torch.nonfinite.contained import REPORT

_TIMES_THE_TENSORS = 64
_NO_MEMORY = ("allocate memory", "out of memory", "MemoryError", "bad_alloc", "std::bad_array_new_length")


def main(directory: str, device: str, gib: str) -> dict[str, Any]:
    """What a replay has found, or why there is nothing."""
    try:
        import torch
    except ModuleNotFoundError as error:
        return {"missing": error.name}
    from traindiff.observe.torch.nonfinite.replaying import replay, table
    from traindiff.observe.torch.nonfinite.saved_call import TENSORS_FILE

    try:
        _check_device(torch, device)
        limit = _limit_memory(Path(directory) / TENSORS_FILE, float(gib)) if device == "cpu" else None
        try:
            found = replay(Path(directory), device=device)
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
