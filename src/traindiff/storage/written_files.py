"""The local files of a recording that is being written, and checks that they are still there."""

from __future__ import annotations

import io
import os
import posixpath
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import IO, TypeVar

UNFINISHED = ".unfinished"
_T = TypeVar("_T")


@dataclass(slots=True)
class _Written:
    """Size of a file, and its descriptor while it is open."""

    size: int
    fd: int | None = None


@dataclass(slots=True)
class _Folder:
    """Number and total size of the files that were written into a folder."""

    num_files: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A file or directory that is no longer as it was written.

    Attributes:
        path: The file, or the uppermost directory that is gone.
        message: A sentence about it, without a full stop.
    """

    path: str
    message: str


class UnbufferedFile(io.FileIO):
    """A file that the garbage collector closes without a warning, if nobody has closed the recording."""

    def __del__(self) -> None:
        self.close()


class WrittenFiles:
    """Makes the local files of one rank, and checks that they are still there.

    Args:
        root: Directory of the recording.

    Attributes:
        data: The open file with messages, after `open_data`.
        seals: The open file with their seals, after `open_seals`.
    """

    data: IO[bytes]
    seals: IO[bytes]

    is_local = True
    """Local files are checked at each step, and locked."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._written: dict[str, _Written] = {}
        self._folders: dict[str, _Folder] = {}
        self._made: list[str] = []
        self._streams: dict[str, str] = {}

    def make_directories(self, path: str) -> None:
        """Make a directory and its parents, or none of them if one cannot be made.

        Raises:
            OSError: One cannot be made.
        """
        with suppress(FileNotFoundError):
            os.stat(path)  # noqa: PTH116  a path that is too long is an error before anything is made
        missing = []
        while not os.path.isdir(path):  # noqa: PTH112  a path of fsspec
            missing.append(path)
            path = posixpath.dirname(path)
        made: list[str] = []
        try:
            for one in reversed(missing):
                made += [one] if _make_directory(one) else []
        except OSError:
            _remove_directories(made)
            raise
        self._made += made

    def open_data(self, path: str) -> None:
        """Open the new file to which `append` writes messages."""
        self._streams["data"], self.data = path, self._open(path)

    def open_seals(self, path: str) -> None:
        """Open the new file to which `append` writes seals."""
        self._streams["seals"], self.seals = path, self._open(path)

    def _open(self, path: str) -> IO[bytes]:
        file = UnbufferedFile(path, "xb")
        self._written[path] = _Written(size=0, fd=file.fileno())
        return file

    def append(self, seal: bytes, message: bytes, step: int | None, optimizer: str) -> None:  # noqa: ARG002
        """Write a message and its seal to the end of the open files, and hand them to the file system.

        Args:
            seal: The line of its seal. Nothing may follow a half-written message (the disk is full), so it is first.
            message: The message.
            step: The step that the message belongs to, if it does; a local file does not need that.
            optimizer: Whose step it is.
        """
        for name, content in (("seals", seal), ("data", message)):
            file: IO[bytes] = getattr(self, name)
            write_all(file, content)
            file.flush()
            self._written[self._streams[name]].size += len(content)

    def begin(self) -> None:
        """Nothing: what was written was handed to the file system at once."""

    def end(self) -> None:
        """Nothing: what was written was handed to the file system at once."""

    def close(self) -> None:
        """Close the open files."""
        with ExitStack() as files:
            for name in self._streams:
                files.callback(getattr(self, name).close)

    def put(self, path: str, content: bytes) -> None:
        """Write a whole file atomically: a reader sees the old file or the new file, never a part."""
        unfinished = path + UNFINISHED
        with open(unfinished, "wb", buffering=0) as file:  # noqa: PTH123
            write_all(file, content)
        os.replace(unfinished, path)  # noqa: PTH105
        self._written[path] = _Written(size=len(content))

    def put_in_folder(self, path: str, content: bytes, *, step: int, optimizer: str) -> None:  # noqa: ARG002
        """Write a file that readers only open once its name is written elsewhere."""
        folder = posixpath.dirname(path)
        if folder not in self._folders:
            self.make_directories(folder)
            self._folders[folder] = _Folder()
        with open(path, "wb") as file:  # noqa: PTH123
            write_all(file, content)
        self._folders[folder].num_files += 1
        self._folders[folder].size += len(content)

    def lost(self) -> Lost | None:
        """The first file that is missing or was changed; None if all are intact, or only `lost_at_the_end` can tell."""
        return self._first_lost(_changed, self._written)

    def lost_at_the_end(self) -> Lost | None:
        """As `lost`, when all files are complete: also in folders."""
        return self._first_lost(_changed, self._written) or self._first_lost(_emptied, self._folders)

    def _first_lost(self, changed: Callable[[str, _T], str], kept: Mapping[str, _T]) -> Lost | None:
        for path, one in kept.items():
            try:
                if message := changed(path, one):
                    return Lost(path=path, message=f"{path} {message}")
            except (FileNotFoundError, NotADirectoryError):
                gone = self._uppermost_gone(path)
                return Lost(path=gone, message=f"{gone} is no longer there: it was moved, deleted or unmounted")
            except OSError as error:
                return Lost(path=path, message=f"{path} can no longer be reached: {error.strerror or error}")
        return None

    def _uppermost_gone(self, path: str) -> str:
        gone = path
        while gone != self._root and not os.path.lexists(above := posixpath.dirname(gone)):
            gone = above
        return gone

    def discard(self) -> None:
        """Remove the files and directories that were made here, as far as possible."""
        self.close()
        for path in self._written:
            for one in (path, path + UNFINISHED):
                with suppress(OSError):  # as far as that is possible
                    os.unlink(one)  # noqa: PTH108
        _remove_directories(self._made)


def write_all(file: IO[bytes], content: bytes) -> None:
    """Write all of the content, even if the file takes only a part at a time."""
    rest = memoryview(content)
    while rest:
        written = file.write(rest)
        rest = rest[len(rest) if written is None else written :]  # some file systems of fsspec do not say


def _changed(path: str, written: _Written) -> str:
    there = os.stat(path)  # noqa: PTH116
    if written.fd is None:
        return "" if there.st_size >= written.size else _short(there.st_size, written.size)
    is_open = os.fstat(written.fd)
    if is_open.st_size < written.size:
        return _short(is_open.st_size, written.size)
    # Some file systems number their files anew, so another number alone says nothing.
    is_another = (there.st_dev, there.st_ino) != (is_open.st_dev, is_open.st_ino)
    if is_another and (not is_open.st_nlink or there.st_size != is_open.st_size):
        return "is another file now: what was written was moved, deleted or replaced"
    return ""


def _emptied(path: str, folder: _Folder) -> str:
    sizes = _sizes(path)
    if len(sizes) < folder.num_files:
        return f"holds {len(sizes):,} of the {folder.num_files:,} files that were written"
    return _short(sum(sizes), folder.size) if sum(sizes) < folder.size else ""


def _short(size: int, written: int) -> str:
    return f"holds {size:,} of the {written:,} bytes that were written: it was cut short"


def _sizes(folder: str) -> list[int]:
    with os.scandir(folder) as entries:
        return [entry.stat(follow_symlinks=False).st_size for entry in entries]


def _make_directory(path: str) -> bool:
    """Make a directory; False if another rank was faster."""
    try:
        os.mkdir(path)  # noqa: PTH102
    except FileExistsError:
        if not os.path.isdir(path):  # noqa: PTH112
            raise
        return False
    return True


def _remove_directories(made: list[str]) -> None:
    for one in reversed(made):
        with suppress(OSError):  # another rank has put something there
            os.rmdir(one)  # noqa: PTH106
