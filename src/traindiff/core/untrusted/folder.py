"""Access to the files of one directory: only regular files inside it, and only up to a size limit."""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from traindiff.core.untrusted.demands import Refuse, damaged
from traindiff.core.untrusted.local_files import LocalFiles
from traindiff.core.untrusted.ranges import MOST_AHEAD, ranged, ranged_file

_OPEN = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOCTTY", 0)
_OPEN |= getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
"""Flags that neither wait for the other end of a FIFO nor follow a link that has just replaced the file."""


LEADS_OUTSIDE = "it is a link that leads outside of"
"""How what is said of such a link begins."""


class Folder:
    """Reads files of a directory that a stranger may have filled.

    Names are relative, with `/` between their parts. A name must lead to a regular file whose resolved path (links
    are followed) lies inside the directory, or where the caller allows it. FIFOs, sockets, devices and directories are
    refused, and reading never waits for them. The path of the directory itself may contain links.

    Args:
        file_system: The file system that the directory is in: `LocalFiles`, or one of fsspec.
        root: Its path there.
        refuse: Makes the error for a refused file.
        ahead: The most bytes that are read beyond what is asked for, if many files are read beside each other. Local
            files are then opened for each read, since a process may have few open.
        also: Resolved local paths beside the directory, to which links in it may lead, or below them.
    """

    def __init__(
        self,
        file_system: Any,
        root: str,
        *,
        refuse: Refuse = damaged,
        ahead: int | None = None,
        also: Sequence[str] = (),
    ) -> None:
        self.file_system = file_system
        self._local = isinstance(file_system, LocalFiles)
        self.refuse = refuse
        self.root = root
        self.ahead = ahead
        self._also = tuple(also)

    @property
    def most_ahead(self) -> int:
        """The most bytes that are read beyond what is asked for in a file of a store."""
        return MOST_AHEAD if self.ahead is None else self.ahead

    @classmethod
    def of(cls, path: str | os.PathLike[str], *, refuse: Refuse = damaged) -> Folder:
        """The folder of a local directory."""
        return cls(LocalFiles(), os.fspath(path), refuse=refuse)

    def within(self, name: str, *, ahead: int | None = None) -> Folder:
        """The folder of a directory below this one. Its files must lie in *its* directory. `ahead` is as above.

        Raises:
            TraindiffError: The directory lies outside this one.
        """
        path = self.path(name)
        if self._local:
            self._resolved(name)
        return Folder(self.file_system, path, refuse=self.refuse, ahead=ahead, also=self._also)

    def path(self, name: str) -> str:
        """The path of a file, for messages.

        Raises:
            TraindiffError: The name leads outside, or cannot be one.
        """
        parts = name.split("/")
        if name.startswith(("/", "\\")) or ".." in parts or os.path.isabs(name) or os.path.splitdrive(name)[0]:  # noqa: PTH117
            raise self.refuse(self.root, f"it names the file {name[:80]!r}, which lies outside of it")
        if "\0" in name or "\\" in name or not all(parts) or "." in parts:
            raise self.refuse(self.root, f"it names the file {name[:80]!r}, which is not a relative path")
        return posixpath.join(self.root, name)

    def exists(self, name: str) -> bool:
        """True if anything has this name, even something unreadable: `read` then says what is wrong with it."""
        path = self.path(name)
        return os.path.lexists(path) if self._local else bool(self.file_system.exists(path))

    def names(self) -> list[str]:
        """Sorted names of the entries of the directory, without those of directories below it."""
        if self._local:
            return sorted(os.listdir(self.root))  # noqa: PTH208  a Path for each of a million costs
        entries = self.file_system.ls(self.root, detail=False)
        return sorted(posixpath.basename(entry.rstrip("/")) for entry in entries)

    def kinds(self) -> dict[str, bool]:
        """True for each entry of the directory that is itself one, by name, on a file system that is not local."""
        entries = self.file_system.ls(self.root, detail=True)
        return {posixpath.basename(one["name"].rstrip("/")): one.get("type") == "directory" for one in entries}

    def sizes(self) -> dict[str, int]:
        """Size of each entry of the directory by name, in one request; 0 for what is no regular file.

        Nothing if the directory cannot be listed: whoever reads a file in it is told why.
        """
        found: dict[str, int] = {}
        if not self._local:
            with suppress(FileNotFoundError):
                entries = self.file_system.ls(self.root, detail=True)
                found = {posixpath.basename(one["name"].rstrip("/")): int(one.get("size") or 0) for one in entries}
            return found
        with suppress(OSError), os.scandir(self.root) as listed:
            for one in listed:
                with suppress(OSError):  # removed meanwhile, or a link that leads nowhere
                    status = one.stat(follow_symlinks=True) if one.is_file() else None
                    found[one.name] = status.st_size if status else 0
        return found

    def size(self, name: str) -> int:
        """Size of a file in bytes.

        Raises:
            TraindiffError: There is no regular file of this name inside the directory.
        """
        if self._local:
            return self._status(self._resolved(name), name).st_size
        return self._about(self.path(name))

    def state(self, name: str) -> str:
        """A text that changes when a file is written again, by one request; empty if there is nothing of this name.

        Raises:
            TraindiffError: It leads outside, or is no regular file.
        """
        path = self.path(name)
        if self._local:
            status = self._status(self._resolved(name), name) if os.path.lexists(path) else None
            return f"{status.st_size}:{status.st_mtime_ns}:{status.st_ino}" if status else ""
        try:
            return str(self.file_system.info(path))
        except FileNotFoundError:
            return ""

    def open(self, name: str, *, limit: int | None = None) -> IO[bytes]:
        """Open a file, which may have `limit` bytes, to read it piece by piece.

        Raises:
            TraindiffError: There is no regular file of this name inside the directory, or it is larger.
            OSError: It may not be read.
        """
        if self._local and self.ahead is not None:
            read = self.read_range
            file = ranged(self.size(name), lambda first, count: read(name, first, count).tobytes(), most_ahead=0)
        else:
            file = self._opened(name)
        if limit is not None and (size := file.seek(0, os.SEEK_END)) > limit:
            file.close()
            raise self.refuse(self.path(name), f"it has {size} bytes, and may have {limit}")
        if limit is not None:
            file.seek(0)
        return file

    def _opened(self, name: str) -> IO[bytes]:
        path = self.path(name)
        if not self._local:
            return ranged_file(self.file_system, path, self._about(path), most_ahead=self.most_ahead)
        resolved = self._resolved(name)
        self._status(resolved, name)  # opening a device may do something
        try:
            descriptor = os.open(resolved, _OPEN)
        except FileNotFoundError:
            raise self._missing(path) from None
        opened = os.fdopen(descriptor, "rb") if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
        if opened is None:  # replaced since
            os.close(descriptor)
            raise self.refuse(path, "it is not a regular file")
        return opened

    def read(self, name: str, *, limit: int) -> bytes:
        """The content of a file, which may have `limit` bytes; no more are read.

        Raises:
            TraindiffError: There is no regular file of this name inside the directory, or it is larger.
            OSError: It may not be read.
        """
        with self.open(name, limit=limit) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            content = file.read(size + 1)  # not the limit: as many bytes are allocated at once
        if len(content) > limit:
            raise self.refuse(self.path(name), f"it has more than the {limit} bytes that it may have")
        return content

    def read_range(self, name: str, first: int, count: int, into: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """`count` bytes of a file from byte `first` on; fewer where it ends. Several threads may read at once.

        Args:
            name: The file.
            first: The first byte.
            count: How many.
            into: Bytes that a local file may be read into, if they are enough: new memory costs as much as reading.

        Raises:
            TraindiffError: There is no regular file of this name inside the directory.
            OSError: It may not be read.
        """
        if not self._local:
            end = min(first + count, self._about(self.path(name)))  # stores refuse a range behind the end
            content = self._content(self.path(name), first, end) if first < end else b""
            return np.frombuffer(content, dtype=np.uint8)
        with self._opened(name) as file:
            length = os.fstat(file.fileno()).st_size
            size = max(0, min(count, length - first))
            found = into[:size] if into is not None and len(into) >= size else np.empty(size, dtype=np.uint8)
            file.seek(first)
            return found[: file.readinto(found.data)]  # type: ignore[attr-defined]

    def read_ranges(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes]:
        """Several ranges (name, first byte, count) that exist; stores are asked for all of them at once.

        Raises:
            TraindiffError: There is no regular file of a name inside the directory.
            OSError: One may not be read.
        """
        if self._local:
            return [self.read_range(*one).tobytes() for one in ranges]
        paths = [self.path(name) for name, _, _ in ranges]
        starts = [first for _, first, _ in ranges]
        found = self.file_system.cat_ranges(
            paths, starts, [first + count for _, first, count in ranges], on_error="return"
        )
        for path, content in zip(paths, found, strict=True):
            if isinstance(content, FileNotFoundError):
                raise self._missing(path)
            if isinstance(content, Exception):
                raise content
        return list(found)

    def _content(self, path: str, first: int, end: int) -> bytes:
        """A range that exists, on a file system that is not local."""
        try:
            return bytes(self.file_system.cat_file(path, start=first, end=end))
        except FileNotFoundError:
            raise self._missing(path) from None

    def _about(self, path: str) -> int:
        """Size of a regular file on a file system that is not local; anything else is refused."""
        try:
            about = self.file_system.info(path)
        except FileNotFoundError:
            raise self._missing(path) from None
        if about.get("type") != "file" or about.get("islink"):
            raise self.refuse(path, "it is not a regular file")
        return int(about.get("size") or 0)

    def _resolved(self, name: str) -> str:
        """The path of this name with all links resolved."""
        path = self.path(name)
        try:
            root, resolved = os.path.realpath(self.root), os.path.realpath(path)
        except ValueError:  # not a path on this system
            raise self.refuse(self.root, f"it names the file {name[:80]!r}, which cannot be a path") from None
        if not any(Path(resolved).is_relative_to(one) for one in (root, *self._also)):
            raise self.refuse(path, f"{LEADS_OUTSIDE} {self.root}")
        return resolved

    def _status(self, resolved: str, name: str) -> os.stat_result:
        path = self.path(name)
        try:
            status = os.stat(resolved)  # noqa: PTH116
        except FileNotFoundError:
            raise self._missing(path) from None
        except NotADirectoryError:
            raise self.refuse(path, "a part of its path is a file") from None
        except OSError as error:
            if isinstance(error, PermissionError):
                raise
            raise self.refuse(path, f"it cannot be opened ({error.strerror})") from None
        if not stat.S_ISREG(status.st_mode):
            raise self.refuse(path, f"it is {_KINDS.get(stat.S_IFMT(status.st_mode), 'something else')}, not a file")
        return status

    def _missing(self, path: str) -> Exception:
        return self.refuse(path, "the file is missing")


_KINDS = {
    stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory", stat.S_IFLNK: "a link that leads to itself",
}  # fmt: skip
