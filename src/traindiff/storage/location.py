"""Where a recording is (a local path or any fsspec URL), and room for it there.

What may be replaced is removed, and everything else is left alone.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import weakref
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from typing import Any, Protocol

from traindiff.core.untrusted.local_files import LocalFiles, local_path
from traindiff.errors import ConfigError, Problem
from traindiff.storage import manifest, stores
from traindiff.storage.gap import GAP_FILE
from traindiff.storage.stores import Store
from traindiff.storage.written_files import UNFINISHED

DATA = "observations.arrows"
"""Name of the file with a rank's observations."""

SEALS = "observations.crc"
"""Name of the file with their checksums."""

MERGED = "merged"
"""Name of the directory with the steps whose ranks are merged, in a compact recording."""

PLACES = "places"
"""Name of the directory beside it that says which ranks have which parts."""

NODE = re.compile(r"node-(\d{5,6})\.frames", re.ASCII)
"""Names of files with all that the ranks of a node have recorded."""

SEGMENT = re.compile(r"observations-(\d{15})-(\d{10})\.segment", re.ASCII)
"""Names of files with a part of both, on stores that cannot append: where it begins, and its length."""

LONGEST = 150
"""Limit for the characters of a file name without its ending."""

_DIGEST = 16
_UNSAFE = re.compile(r"[^A-Za-z0-9._\-]")
_RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?$|[.~].*$|.*\.$|$")


def file_name(text: str) -> str:
    """A file name for `text`; different texts get different names.

    Letters without accents, digits and `._-` stand for themselves, every other character for the hexadecimal bytes
    of its UTF-8, each behind a `%`. Names that some system reserves (`con`, `..`, a leading dot) begin with
    `%_`. A longer name than `LONGEST` is cut and ends in `%~` and 16 hexadecimal digits of the SHA-256 of `text`.
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


def of_this_start(path: str) -> str:
    """The directory of a recording; one beside it after torchrun has restarted the ranks, so that both are kept.

    The number of ranks may be another one then.

    Args:
        path: As the user gave it, or as this function returned it.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    ending = f"-restart-{restarts}"
    return path if restarts == "0" or path.endswith(ending) else f"{path.rstrip('/')}{ending}"


def node_name(node: int) -> str:
    """Name of the file of a node."""
    return f"node-{node:05d}.frames"


def segment_name(first: int, length: int) -> str:
    """Name of the object with `length` bytes of the observations from offset `first` on."""
    return f"observations-{first:015d}-{length:010d}.segment"


def file_system(path: str) -> tuple[Any, str]:
    """The file system of a path or URL, and the path in it.

    Returns:
        `LocalFiles`, or a `Store` for any other one.

    Raises:
        ConfigError: The protocol is not known or needs a package that is not installed, its credentials or settings
            are missing, or the path is relative to a working directory that no longer exists.
    """
    protocol = stores.protocol_of(path)
    try:
        local = local_path(path)
        if local is not None:
            return LocalFiles(), local
        file_system, root = stores.opened(path)
    except ImportError as error:
        raise _unreachable(path, f"cannot be reached: {error}.", stores.missing_package(path)) from None
    except OSError as error:  # the working directory was deleted
        fix = "Write an absolute path, or change to a directory that is there."
        raise _unreachable(path, f"cannot be reached: {error.strerror or error}.", fix) from None
    except Exception as error:
        if stores.is_known(protocol):  # the store's package wants settings or credentials
            said = stores.explained(error, protocol, path.partition("://")[2])
            raise _unreachable(path, f"cannot be reached: {said.what}.", said.fix) from error
        if not isinstance(error, ValueError):
            raise
        fix = f"Write a local path, or a URL of one of: {', '.join(sorted(stores.known())[:12])}, ..."
        raise _unreachable(path, f"cannot be reached: {error}.", fix) from None
    return (LocalFiles(), root) if stores.is_local(file_system) else (Store(file_system, protocol), root)


def lacks_container(file_system: Any, root: str) -> stores.StoreError | None:
    """The error for a path in a store whose bucket does not exist; None if it does, or for other file systems."""
    return file_system.lacks_container(root) if isinstance(file_system, Store) else None


def _unreachable(path: str, what: str, fix: str) -> ConfigError:
    return ConfigError("the path of a recording", [Problem(where=repr(path), what=what, fix=fix)])


_FILES = frozenset({DATA, SEALS, "rank.json", "tensors", GAP_FILE, "rank.json" + UNFINISHED, GAP_FILE + UNFINISHED})
"""Names of everything in a rank's directory."""

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
    num_nodes: int = 0,
) -> None:
    """Remove what an earlier recording left at the place of a new one.

    Args:
        file_system: File system of the recording.
        root: Directory of the recording, in this file system.
        path: The same directory as the user wrote it.
        rank: Rank of this process.
        recorded: All ranks that are recorded.
        leads: Whether this rank also removes the directories of ranks that are not recorded.
        overwrite: Whether a recording may be removed.
        num_nodes: How many nodes write one file each for all their ranks; 0 if ranks have directories.

    Raises:
        ConfigError: The directory holds something else, a recording that may not be replaced, or one that is still
            being written.
    """
    if not file_system.exists(root):
        if (missing := lacks_container(file_system, root)) is not None:
            raise missing
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
    beyond |= {MERGED, PLACES} & names
    beyond |= {name for name in names if (match := NODE.fullmatch(name)) and int(match[1]) >= num_nodes}
    if other := _other_things(file_system, root, names, ranks={mine, *beyond} & names):
        raise unusable(
            path,
            what=f"is a directory that holds other things than a recording ({', '.join(sorted(other)[:3])}).",
            fix="Give the path of a directory that does not exist yet. overwrite=True replaces recordings, "
            "nothing else.",
        )
    stale = sorted(({mine, *beyond} if leads else {mine}) & names)
    with ExitStack() as locks:
        if isinstance(file_system, LocalFiles):
            for name in stale:  # nobody else may take one over before it is removed
                held = name if NODE.fullmatch(name) else posixpath.join(name, DATA)
                locks.callback(_take_over(posixpath.join(root, held), path=path).release)
        # Other ranks of this run may have been faster, so their directories are no reason to refuse.
        if not overwrite and (mine in names or (leads and ("run.json" in names or beyond))):
            raise unusable(
                path,
                what="already holds a recording.",
                fix="Give another path, or overwrite=True to replace it.",
            )
        for name in stale:
            file_system.rm(posixpath.join(root, name), recursive=True)


TEMPORARY = re.compile(r".+\.(pruned-[0-9a-f]{12}|unfinished-\d{1,9})", re.ASCII)
"""Names of directories in which a compact recording is being made; see `traindiff.analyse.compact`."""


def foreign_files(root: str) -> list[str]:
    """Paths, in a local recording, of files and directories that are no part of it, without what is inside of them."""
    names = _names(LocalFiles(), root)
    own = {name for name in names if _rank_of(name) >= 0 or name in (MERGED, PLACES)}
    files = {name for name in own if not os.path.isdir(posixpath.join(root, name))}  # noqa: PTH112  of thousands of ranks
    return sorted(_other_things(LocalFiles(), root, names, ranks=own - files) | files)


def size_bytes(root: str) -> int:
    """Size of the files of a local recording; of other files in its directory, nothing."""
    foreign = {posixpath.join(root, name) for name in foreign_files(root)}
    total = 0
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if posixpath.join(folder, name) not in foreign]
        own = [path for name in files if (path := posixpath.join(folder, name)) not in foreign]
        for path in own:
            with suppress(OSError):  # removed meanwhile
                total += os.lstat(path).st_size
    return total


_MOST_LOCKS = 64
"""Locks that are held at once: a process may have few open files. Any of them keeps another recording out."""


@contextmanager
def without_writers(root: str) -> Iterator[list[str]]:
    """Keep other recordings from the place of a local one.

    Yields:
        The directories of ranks, and the files of nodes, that a process is writing at the moment; nothing if the file
        system has no locks.
    """
    taken = []
    with ExitStack() as held:
        for number, name in enumerate(sorted(_names(LocalFiles(), root))):
            if not NODE.fullmatch(name) and _rank_of(name) < 0:
                continue
            lock = RecordingLock(posixpath.join(root, name, *([] if NODE.fullmatch(name) else [DATA])))
            taken += [name] if lock.is_taken else []
            if number < _MOST_LOCKS:
                held.callback(lock.release)
            else:
                lock.release()
        yield taken


def _other_things(file_system: Any, root: str, names: set[str], *, ranks: set[str]) -> set[str]:
    """Names of files that are not part of a recording."""
    other = {name for name in names if _rank_of(name) < 0 and not NODE.fullmatch(name)}
    other -= {"run.json", "run.json" + UNFINISHED, MERGED, PLACES}
    if "run.json" in names:
        run = file_system.cat_file(posixpath.join(root, "run.json"))
        if manifest.FORMAT_NAME.encode() not in run:  # damaged or newer is still a recording
            other.add("run.json")
    for name in sorted(name for name in ranks if not NODE.fullmatch(name)):
        inside = _names(file_system, posixpath.join(root, name)) - _FILES
        other |= {f"{name}/{inner}" for inner in inside if not SEGMENT.fullmatch(inner)}
    return other


def _take_over(file: str, *, path: str) -> RecordingLock:
    """The lock of an earlier recording: of a rank's stream, or of the file of a node."""
    lock = RecordingLock(file)
    if lock.is_taken:
        name = posixpath.basename(file if NODE.fullmatch(posixpath.basename(file)) else posixpath.dirname(file))
        raise unusable(
            path,
            what=f"is being recorded at the moment ({name}), by this process or by another one.",
            fix="Give another path, or end that recording first: call its close(), or end its process.",
        )
    return lock


def unusable(path: str, *, what: str, fix: str) -> ConfigError:
    """The error for a path that cannot be recorded to."""
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
    """A lock on a local file until `release` or the end of this process; readers ignore it.

    Attributes:
        is_taken: Whether another recording has it. False if the file does not exist, or the file system has no locks.
    """

    def __init__(self, path: str) -> None:
        self.is_taken = False
        self._fd = -1
        try:
            import fcntl  # missing on Windows, where recordings are compared too

            release_in_forks(self)
            self._fd = os.open(path, os.O_RDWR)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.is_taken = True
            self.release()
        except (ImportError, OSError):  # no file, no right to write it, or no locks on this system
            self.release()

    def __del__(self) -> None:
        self.release()

    def release(self) -> None:
        """Release the lock. Later calls do nothing."""
        fd, self._fd = self._fd, -1
        _HELD.discard(self)
        if fd >= 0:
            os.close(fd)


class Held(Protocol):
    """Something of this process that its forks must not keep."""

    def release(self) -> None:
        """Let go of it."""


_HELD: weakref.WeakSet[Held] = weakref.WeakSet()
"""What this process holds, for its forks."""


def release_in_forks(held: Held) -> None:
    """Make forks of this process release something, so that no data-loader worker keeps it."""
    _HELD.add(held)
    _ask_forks()


@cache
def _ask_forks() -> None:
    os.register_at_fork(after_in_child=_release_all)


def _release_all() -> None:
    for held in list(_HELD):
        held.release()
