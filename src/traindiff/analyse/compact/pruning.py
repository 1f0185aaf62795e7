"""`traindiff prune`: put a recording's compact form in its place, once both have given the same verdict."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from traindiff.analyse.check import check
from traindiff.analyse.compact.compacting import Compacted, compact
from traindiff.errors import ConfigError, Problem, RecordingError
from traindiff.storage.stores import protocol_of


def prune(
    recording: str | os.PathLike[str],
    *,
    whole_every: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Compacted:
    """Replace a recording by its compact form.

    Before the recording is removed, both forms are checked by all rules, and must have the same findings and notes.

    Args:
        recording: A local directory.
        whole_every: Keep every n-th step rank by rank.
        progress: Called with the number of each step.

    Returns:
        What was made; its `output` is the path of the recording.

    Raises:
        ConfigError: The recording holds what cannot be merged, or is not on this machine.
        RecordingError: The recording cannot be used, or its compact form has other findings. It is then as before.
    """
    if protocol_of(os.fspath(recording)):
        fix = "Use traindiff compact with -o DIRECTORY, and put its result in the place of the recording yourself."
        problem = Problem(where=os.fspath(recording), what="is no path on this machine.", fix=fix)
        raise ConfigError("traindiff prune", [problem], consequence="nothing was removed")
    path = Path(recording)
    pruned, old = (path.with_name(f"{path.name}.{word}-{os.getpid()}") for word in ("pruned", "replaced"))
    try:
        made = compact(path, pruned, whole_every=whole_every, progress=progress)
        if _said(check(path)) != _said(check(pruned)):
            raise RecordingError(
                f"{path} stays as it is: its compact form has other findings than it. Please report this. "
                "`traindiff compact` writes the compact form beside it."
            )
        path.rename(old)
        pruned.rename(path)
    finally:
        shutil.rmtree(pruned, ignore_errors=True)
    shutil.rmtree(old)
    return replace(made, output=str(path))


def _said(verdict: Any) -> Mapping[str, Any]:
    """What a verdict says, without the path of the recording."""
    found = verdict.to_json()
    notes = [note.replace(found["recording"], "") for note in found["notes"]]
    return {**found, "recording": "", "notes": notes}
