"""Where a recording is (a local path or any fsspec URL), and room for it there.

What may be replaced is removed, and everything else is left alone.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import weakref
from collections.abc import Collection
from contextlib import ExitStack
from functools import cache
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from traindiff.errors import ConfigError, Problem
from traindiff.storage import manifest
from traindiff.storage.gap import GAP_FILE
from traindiff.storage.written_files import UNFINISHED

DATA = "observations.arrows"
"""File of a rank's observations."""

SEALS = "observations.crc"
"""File of their checksums."""

LONGEST = 150
"""Characters of a file name at most, its ending left out."""

_DIGEST = 16
_UNSAFE = re.compile(r"[^A-Za-z0-9._\-]")
_RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?$|[.~].*$|.*\.$|$")


def file_name(text: str) -> str:
    """A file name for `text`; different texts get different names.

    Letters without accents, digits and `._-` stand for themselves, every other character for the hexadecimal bytes
    of its UTF-8, each behind a `%`. Names that some system reserves (`con`, `..`, a leading dot) begin with
    `%_`. What is longer than `LONGEST` is cut, and ends in `%~` and 16 hexadecimal digits of the SHA-256 of `text`.
    Upper-case letters are kept apart from lower-case ones by the reader, not by a file system that
    ignores case; traindiff's own names begin with a number that is unique.
    """
    name = _UNSAFE.sub(
        lambda match: "".join(f"%{byte:02x}" for byte in match[0].encode("utf-8", "surrogatepass")), text
    )
    if _RESERVED.match(name):
        name = f"%_{name}"
    if len(name) > LONGEST:
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST]
        name = f"{name[: LONGEST - _DIGEST - 2]}%~{digest}"
    return name


def rank_directory(rank: int) -> str:
    """Name of a rank's directory in a recording."""
    return f"rank-{rank:05d}"


def file_system(path: str) -> tuple[Any, str]:
    """The fsspec file system of a path or URL, and the path in it.

    Raises:
        ConfigError: The protocol is not known, or needs a package that is not installed; or the path is relative to
            a working directory that is gone.
    """
    try:
        file_system, root = fsspec.core.url_to_fs(path)
    except ImportError as error:
        fix = "Install that package where traindiff is installed."
        raise _unreachable(path, f"cannot be reached: {error}.", fix) from None
    except OSError as error:  # the working directory was deleted
        fix = "Write an absolute path, or change to a directory that is there."
        raise _unreachable(path, f"cannot be reached: {error.strerror or error}.", fix) from None
    except ValueError as error:
        fix = f"Write a local path, or a URL of one of: {', '.join(sorted(fsspec.available_protocols())[:12])}, ..."
        raise _unreachable(path, f"cannot be reached: {error}.", fix) from None
    return file_system, root


def _unreachable(path: str, what: str, fix: str) -> ConfigError:
    return ConfigError("the path of a recording", [Problem(where=repr(path), what=what, fix=fix)])


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
