"""Room for a recording: what may be replaced is removed, and everything else is left alone."""

from __future__ import annotations

import os
import posixpath
import re
import weakref
from collections.abc import Collection
from contextlib import ExitStack
from functools import cache
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from traindiff.errors import ConfigError, Problem
from traindiff.storage import manifest
from traindiff.storage.gap import GAP_FILE
from traindiff.storage.location import DATA, SEALS, rank_directory
from traindiff.storage.written_files import UNFINISHED


class RecordingLock:
    """A lock on a file, until `release` or the end of this process; readers do not notice it.

    Args:
        path: Local path of the file.

    Attributes:
        is_held: Whether the lock was got. False where another recording holds it, and where there is no file or the
            file system has no locks.
        is_taken: Whether another recording holds it.
    """

    def __init__(self, path: str) -> None:
        self.is_taken = False
        self.is_held = False
        self._fd = -1
        _LOCKS.add(self)
        try:
            import fcntl  # Windows has none; recordings are compared there, too

            _release_in_forks()
            self._fd = os.open(path, os.O_RDWR)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.is_held = True
        except BlockingIOError:
            self.is_taken = True
            self.release()
        except (ImportError, OSError):  # no file, or no right to write it; or this system has no locks
            self.release()

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Give the lock back. Later calls do nothing."""
        fd, self._fd = self._fd, -1
        self.is_held = False
        _LOCKS.discard(self)
        if fd >= 0:
            os.close(fd)


_LOCKS: weakref.WeakSet[RecordingLock] = weakref.WeakSet()
"""The locks of this process, for its forks."""


@cache
def _release_in_forks() -> None:
    """Have forks of the process let go of its locks, so that none outlives it in a worker of a data loader."""
    os.register_at_fork(after_in_child=_release_all)


def _release_all() -> None:
    for lock in list(_LOCKS):
        lock.release()


_FILES = frozenset({DATA, SEALS, "rank.json", "tensors", GAP_FILE, "rank.json" + UNFINISHED, GAP_FILE + UNFINISHED})
"""What a rank's directory holds."""

_LONGEST_SHOWN = 300


def make_room(
    file_system: Any,
    root: str,
    *,
    path: str,
    rank: int,
    recorded: Collection[int],
    leads: bool,
    overwrite: bool,
) -> None:
    """Remove what an earlier recording left where a rank is to be recorded.

    Args:
        file_system: Where it is.
        root: Directory of the recording, in it.
        path: The same, as the user wrote it.
        rank: Which rank.
        recorded: All ranks that are recorded.
        leads: Whether this rank writes for all of them, and so removes others.
        overwrite: Whether anything may be removed.

    Raises:
        ConfigError: Something else is there, a recording that may not be replaced, or one that is being written.
    """
    if not file_system.exists(root):
        return
    if not file_system.isdir(root):
        raise unusable(
            path,
            what="is a file, and a recording is a directory.",
            fix="Give the path of a directory that does not exist yet.",
        )
    names = _names(file_system, root)
    mine = rank_directory(rank)
    beyond = {name for name in names if _rank_of(name) >= 0 and _rank_of(name) not in recorded}
    if other := _other_things(file_system, root, names, ranks={mine, *beyond} & names):
        raise unusable(
            path,
            what=f"is a directory that holds other things than a recording ({', '.join(sorted(other)[:3])}).",
            fix="Give the path of a directory that does not exist yet. overwrite=True replaces recordings, "
            "nothing else.",
        )
    stale = sorted(({mine, *beyond} if leads else {mine}) & names)
    with ExitStack() as locks:
        if isinstance(file_system, LocalFileSystem):
            for name in stale:  # nobody else takes one over until it is removed
                locks.callback(_take_over(posixpath.join(root, name), path=path).release)
        # Other ranks of this run may have been faster, so their directories are no reason to refuse.
        if not overwrite and (mine in names or (leads and ("run.json" in names or beyond))):
            raise unusable(
                path,
                what="already holds a recording.",
                fix="Give another path, or overwrite=True to replace it.",
            )
        for name in stale:
            file_system.rm(posixpath.join(root, name), recursive=True)


def _other_things(file_system: Any, root: str, names: set[str], *, ranks: set[str]) -> set[str]:
    """What is there and is no part of a recording."""
    other = {name for name in names if _rank_of(name) < 0} - {"run.json", "run.json" + UNFINISHED}
    if "run.json" in names:
        run = file_system.cat_file(posixpath.join(root, "run.json"))
        if manifest.FORMAT_NAME.encode() not in run:  # damaged or newer is still a recording
            other.add("run.json")
    for name in ranks:
        other |= {f"{name}/{inner}" for inner in _names(file_system, posixpath.join(root, name)) - _FILES}
    return other


def _take_over(directory: str, *, path: str) -> RecordingLock:
    """The lock of a rank that is there."""
    lock = RecordingLock(posixpath.join(directory, DATA))
    if lock.is_taken:
        raise unusable(
            path,
            what=f"is being recorded at the moment ({posixpath.basename(directory)}), by this process or by another "
            "one.",
            fix="Give another path, or end that recording first: call its close(), or end its process.",
        )
    return lock


def unusable(path: str, *, what: str, fix: str) -> ConfigError:
    """The error of a path that cannot be recorded to."""
    shown = path if len(path) <= _LONGEST_SHOWN else f"{path[:_LONGEST_SHOWN]}..."
    problem = Problem(where=f"record(path={shown!r})", what=what, fix=fix)
    return ConfigError("record(...)", [problem], consequence="nothing was attached to the model")


def _names(file_system: Any, directory: str) -> set[str]:
    entries = file_system.ls(directory, detail=False)
    return {posixpath.basename(entry.rstrip("/")) for entry in entries}


def _rank_of(name: str) -> int:
    match = re.fullmatch(r"rank-(\d{5,})", name, re.ASCII)
    return int(match[1]) if match else -1
