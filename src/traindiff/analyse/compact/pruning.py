"""`traindiff prune`: put a recording's compact form in its place, once both have given the same verdict."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from traindiff.analyse.blocks.tasks import Workers
from traindiff.analyse.check import check
from traindiff.analyse.compact.compacting import Compacted, compact
from traindiff.errors import ConfigError, Problem, RecordingError, TraindiffError
from traindiff.storage import Follower, open_recording
from traindiff.storage.location import RecordingLock, foreign_files, size_bytes, without_writers
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
    Files that are no part of the recording stay where they are. A recording whose compact form is not smaller stays.

    Args:
        recording: A local directory, or a link to one.
        whole_every: Keep every n-th step rank by rank.
        progress: Called with the number of each step.
        workers: As for `compact`.
        follow: As for `compact`. The recording is replaced when the run has ended.

    Returns:
        What was made; its `output` is the path of the recording.

    Raises:
        ConfigError: The recording holds what cannot be merged, or is not on this machine.
        RecordingError: The recording cannot be used, or is still being written, or its compact form has other findings,
            or cannot be put in its place. It is then as before, or the message says where it is.
        WorkerError: Worker processes died again and again.
    """
    if protocol_of(os.fspath(recording)):
        fix = "Use traindiff compact with -o DIRECTORY, and put its result in the place of the recording yourself."
        problem = Problem(where=os.fspath(recording), what="is no path on this machine.", fix=fix)
        raise ConfigError("traindiff prune", [problem], consequence="nothing was removed")
    path = Path(recording)
    if path.is_symlink() or path.name in ("", ".."):  # of a link, what it leads to; the working directory has a name
        path = Path(os.path.realpath(path))
    _put_back(path)
    token = uuid4().hex[:12]
    pruned, old = (path.with_name(f"{path.name}.{word}-{token}") for word in ("pruned", "replaced"))
    with ExitStack() as held:
        if path.is_dir():  # else it is waited for
            _hold(path, held)
        before = None
        if follow is None and path.is_dir():
            with _unwritten(path):
                before = size_bytes(str(path))
        held.callback(shutil.rmtree, pruned, ignore_errors=True)
        made = compact(path, pruned, whole_every=whole_every, progress=progress, workers=workers, follow=follow)
        if made.notes:
            raise RecordingError(f"{path} stays as it is, since it may go on. {' '.join(made.notes)}")
        # By their whole paths: the name of a recording may be a word of a note.
        same = _said(check(path.absolute(), workers=workers)) == _said(check(pruned.absolute()))
        if follow is not None:
            _wait_for_writers(path, follow)
        with _unwritten(path):  # from here on nobody else may record there
            now = _checked_size(path, made, same=same, before=made.bytes_before if before is None else before)
            is_kept = made.bytes_after >= now
            if not is_kept:
                _replace(path, pruned, old, made.bytes_after)
    return replace(made, output=os.fspath(recording), is_kept=is_kept)


def _checked_size(path: Path, made: Compacted, *, same: bool, before: int | None) -> int:
    """Size of a recording, if it may be replaced.

    Args:
        path: The recording.
        made: Its compact form.
        same: Whether both have the same findings.
        before: Its size when it was compacted.

    Raises:
        RecordingError: It may not.
    """
    if str(open_recording(str(path)).run.get("created", "")) != made.created:
        raise RecordingError(f"{path} stays as it is: another recording has taken its place meanwhile.")
    if (now := size_bytes(str(path))) != before:
        raise RecordingError(f"{path} stays as it is: it was written to, or replaced, meanwhile. {_WHEN_ENDED}")
    if not same:
        raise RecordingError(
            f"{path} stays as it is: its compact form has other findings than it. Please report this. "
            "`traindiff compact` writes the compact form beside it."
        )
    return now


_WHEN_ENDED = "Prune it when the run has ended, or wait for that with --follow."


def _hold(path: Path, held: ExitStack) -> None:
    """Keep other processes from replacing a recording, and finish what they had begun when they were killed.

    Raises:
        RecordingError: Another process is about to replace it.
    """
    lock = RecordingLock(str(path / "run.json"))
    held.callback(lock.release)
    if lock.is_taken:
        raise RecordingError(f"{path} stays as it is: another process is about to replace it, too.")
    if (created := _created(path)) is None:
        return
    for unfinished in _left(path, "pruned"):
        if _created(unfinished) == created:
            shutil.rmtree(unfinished, ignore_errors=True)
    for old in _left(path, "replaced"):
        if _created(old) == created:
            with suppress(OSError):  # what cannot be removed stays
                _remove(old, path)


@contextmanager
def _unwritten(path: Path) -> Iterator[None]:
    """Inside it, nobody writes the recording, or another one in its place.

    Raises:
        RecordingError: A process is writing it at the moment.
    """
    with without_writers(str(path)) as written:
        if written:
            raise RecordingError(
                f"{path} stays as it is: it is being recorded at the moment ({', '.join(written[:3])}). {_WHEN_ENDED}"
            )
        yield


def _wait_for_writers(path: Path, follow: Follower) -> None:
    """Wait until all ranks have let go of a recording: they close it first."""
    begin = follow.clock()
    while follow.clock() - begin < min(_SECONDS, follow.patience_seconds):
        with without_writers(str(path)) as written:
            if not written:
                return
        follow.wait()


_SECONDS = 60.0
"""How long ranks may take to let go of a recording that they have closed."""


def _put_back(path: Path) -> None:
    """Give a recording its name again, if a process was killed between renaming it and putting another in its place."""
    if os.path.lexists(path):
        return
    for old in _left(path, "replaced"):
        lock = RecordingLock(str(old / "run.json"))
        if not lock.is_taken and _created(old) is not None and not os.path.lexists(path):
            old.rename(path)
        lock.release()


def _created(path: Path) -> str | None:
    """When a recording was made, as it says; None if there is none that can be read."""
    try:
        return str(open_recording(str(path)).run.get("created", ""))
    except (TraindiffError, OSError):
        return None


def _left(path: Path, word: str) -> list[Path]:
    """Directories that processes have made beside a recording while they replaced it."""
    name = re.compile(rf"{re.escape(path.name)}\.{word}-[0-9a-f]{{12}}(\.unfinished-\d{{1,9}})?", re.ASCII)
    return sorted(one for one in path.parent.glob(f"*.{word}-*") if name.fullmatch(one.name))


def _replace(path: Path, pruned: Path, old: Path, size: int) -> None:
    """Put the compact form in the place of a recording, which is given another name and then removed.

    Args:
        path: The recording.
        pruned: Its compact form.
        old: The other name.
        size: Of the compact form.

    Raises:
        RecordingError: A step of this failed; the message says what is where.
    """
    try:
        _make_directories(path, pruned)
        path.rename(old)
        try:
            _put(pruned, path, size)
        except OSError:
            old.rename(path)
            raise
    except OSError as error:
        if not os.path.lexists(path):
            raise RecordingError(
                f"The recording {path} is now {old}, as neither its compact form nor it could be put in its place "
                f"({error.strerror}). It is whole: give it its name again."
            ) from None
        raise RecordingError(
            f"{path} stays as it is: its compact form could not be put in its place ({error.strerror})."
        ) from None
    try:
        _remove(old, path)
    except OSError as error:
        raise RecordingError(
            f"{path} is now its compact form, but what it replaces could not be removed ({error.strerror}). "
            f"What remains of it: {old}"
        ) from None


def _put(pruned: Path, path: Path, size: int) -> None:
    """Give a compact form the name of its recording.

    Raises:
        OSError: It cannot be renamed, or is not whole: without locks, a process on another machine may have removed it.
    """
    pruned.rename(path)
    if size_bytes(str(path)) != size:
        path.rename(pruned)
        raise OSError(errno.ESTALE, "a part of it was removed meanwhile")


def _make_directories(path: Path, pruned: Path) -> None:
    """Make the directories that are no part of a recording in its compact form, too: a training may write to them."""
    for name in foreign_files(str(path)):
        if (path / name).is_dir() and not (path / name).is_symlink():
            for folder, _, _ in os.walk(path / name):
                made = pruned / Path(folder).relative_to(path)
                made.mkdir(parents=True, exist_ok=True)
                shutil.copystat(folder, made)


def _remove(old: Path, path: Path) -> None:
    """Remove a recording that was replaced; files that are no part of it go to the same place in the new one."""
    for name in foreign_files(str(old)):
        (path / name).parent.mkdir(exist_ok=True)
        _move(old / name, path / name)
    shutil.rmtree(old)


def _move(source: Path, target: Path) -> None:
    """Move a file, or all that is in a directory.

    Raises:
        OSError: A file cannot be moved, or one of its name is there already.
    """
    if source.is_dir() and not source.is_symlink():
        if not target.is_dir():
            target.mkdir()
            shutil.copystat(source, target)
        for one in list(source.iterdir()):
            _move(one, target / one.name)
    elif os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, f"{source.name} is in both", str(target))
    else:
        source.rename(target)


def _said(verdict: Any) -> Mapping[str, Any]:
    """What a verdict says, without the path of the recording, which is also in the commands that would tell more."""
    found = verdict.to_json()
    notes = [note.replace(found["recording"], "") for note in found["notes"]]
    return {**found, "recording": "", "notes": notes, "next": []}
