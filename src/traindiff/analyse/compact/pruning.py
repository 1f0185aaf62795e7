"""`traindiff prune`: put a recording's compact form in its place, once both have given the same verdict."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from traindiff.analyse.blocks.tasks import Workers
from traindiff.analyse.check import check
from traindiff.analyse.compact.compacting import Compacted, compact
from traindiff.errors import ConfigError, Problem, RecordingError
from traindiff.storage import Follower, open_recording
from traindiff.storage.stores import protocol_of


def prune(
    recording: str | os.PathLike[str],
    *,
    whole_every: int | None = None,
    progress: Callable[[int], None] | None = None,
    workers: Workers = None,
    follow: Follower | None = None,
) -> Compacted:
    """Replace a recording by its compact form.

    Before the recording is removed, both forms are checked by all rules, and must have the same findings and notes.

    Args:
        recording: A local directory.
        whole_every: Keep every n-th step rank by rank.
        progress: Called with the number of each step.
        workers: As for `compact`.
        follow: As for `compact`. The recording is replaced when the run has ended.

    Returns:
        What was made; its `output` is the path of the recording.

    Raises:
        ConfigError: The recording holds what cannot be merged, or is not on this machine.
        RecordingError: The recording cannot be used, or its compact form has other findings, or cannot be put in its
            place. It is then as before, or the message says where it is.
        WorkerError: Worker processes died again and again.
    """
    if protocol_of(os.fspath(recording)):
        fix = "Use traindiff compact with -o DIRECTORY, and put its result in the place of the recording yourself."
        problem = Problem(where=os.fspath(recording), what="is no path on this machine.", fix=fix)
        raise ConfigError("traindiff prune", [problem], consequence="nothing was removed")
    path = Path(recording)
    pruned, old = (path.with_name(f"{path.name}.{word}-{os.getpid()}") for word in ("pruned", "replaced"))
    try:
        made = compact(path, pruned, whole_every=whole_every, progress=progress, workers=workers, follow=follow)
        if made.notes:
            raise RecordingError(f"{path} stays as it is, since it may go on. {' '.join(made.notes)}")
        if _said(check(path, workers=workers)) != _said(check(pruned)):
            raise RecordingError(
                f"{path} stays as it is: its compact form has other findings than it. Please report this. "
                "`traindiff compact` writes the compact form beside it."
            )
        if str(open_recording(str(path)).run.get("created", "")) != made.created:
            raise RecordingError(f"{path} stays as it is: another recording has taken its place meanwhile.")
        _replace(path, pruned, old)
    finally:
        shutil.rmtree(pruned, ignore_errors=True)
    return replace(made, output=str(path))


def _replace(path: Path, pruned: Path, old: Path) -> None:
    """Put the compact form in the place of a recording, which is given another name and then removed.

    Raises:
        RecordingError: A step of this failed; the message says what is where.
    """
    try:
        path.rename(old)
        try:
            pruned.rename(path)
        except OSError:
            old.rename(path)
            raise
    except OSError as error:
        if old.exists():
            raise RecordingError(
                f"The recording {path} is now {old}, as neither its compact form nor it could be put in its place "
                f"({error.strerror}). It is whole: give it its name again."
            ) from None
        raise RecordingError(
            f"{path} stays as it is: its compact form could not be put in its place ({error.strerror})."
        ) from None
    try:
        shutil.rmtree(old)
    except OSError as error:
        raise RecordingError(
            f"{path} is now its compact form, but what it replaces could not be removed ({error.strerror}). "
            f"Remove the rest of it: {old}"
        ) from None


def _said(verdict: Any) -> Mapping[str, Any]:
    """What a verdict says, without the path of the recording, which is also in the commands that would tell more."""
    found = verdict.to_json()
    notes = [note.replace(found["recording"], "") for note in found["notes"]]
    return {**found, "recording": "", "notes": notes, "next": []}
