"""Recordings with one file for each node: the files of its ranks, one after the other, as they were written.

FORMAT.md describes it under "One file for each node". A reader sees the ranks' directories as they would be without it.
"""

from __future__ import annotations

import os
import posixpath
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from traindiff.core.site import printable
from traindiff.core.untrusted.demands import damaged
from traindiff.core.untrusted.folder import Folder
from traindiff.core.untrusted.local_files import LocalFiles
from traindiff.storage.gap import GAP_FILE
from traindiff.storage.location import NODE

_HEAD = struct.Struct("<4sHQ")
_CHECK = struct.Struct("<I")
_MAGIC = b"TDN1"
_NAME = re.compile(
    rb"rank-\d{5,18}/(rank\.json|GAP|observations-\d{15}-\d{10}\.segment|tensors(/[A-Za-z0-9._%~\-]{1,200}){2})".replace(
        b"GAP", re.escape(GAP_FILE.encode())
    ),
    re.ASCII,
)
"""Names of the files of ranks."""

_MOST_NAME_BYTES = 512
_MOST_HEAD_BYTES = _HEAD.size + _MOST_NAME_BYTES + _CHECK.size
MOST_FRAMES = 1 << 20
"""Limit for the frames of a file. A writer ends a recording before, so that what it wrote can be read."""

_AT_ONCE = 1 << 16


def frame(name: str, content: bytes) -> Sequence[bytes]:
    """A file of a rank as it stands in the file of the node.

    Args:
        name: Its path in the recording.
        content: All of it. A later frame of the same name replaces an earlier one.
    """
    encoded = name.encode()
    head = _HEAD.pack(_MAGIC, len(encoded), len(content)) + encoded
    return head + _CHECK.pack(zlib.crc32(head)), content


class _Frame(NamedTuple):
    """A file of a rank: in which file of a node it lies, where it begins there, and its size."""

    node: str
    first: int
    size: int


class _Node:
    """The file of one node, read as far as it has been written; it may grow.

    Args:
        folder: Directory of the recording.
        name: Name of the file.
    """

    def __init__(self, folder: Folder, name: str) -> None:
        self._folder = folder
        self._name = name
        self._end = 0
        self._num_frames = 0

    def further(self) -> Iterator[tuple[str, _Frame]]:
        """The frames that have been added, by path. One that is not whole was cut off, or is being written."""
        size = self._folder.size(self._name)
        if size <= self._end:
            return
        with self._folder.open(self._name) as file:
            begin, block = self._end, b""
            while True:
                if self._end < begin or self._end + _MOST_HEAD_BYTES > begin + len(block):
                    begin = self._end
                    file.seek(begin)
                    block = file.read(_AT_ONCE)
                found = self._frame(block[self._end - begin :][:_MOST_HEAD_BYTES], size)
                if found is None:
                    return
                path, one = found
                self._end = one.first + one.size
                yield path, one

    def _frame(self, head: bytes, size: int) -> tuple[str, _Frame] | None:
        """The frame that begins at `_end`; None if it is not whole."""
        if len(head) < _HEAD.size:
            return None
        magic, length, count = _HEAD.unpack_from(head)
        if magic != _MAGIC or not 0 < length <= _MOST_NAME_BYTES:
            raise self._damaged("no frame begins there")
        checked = _HEAD.size + length
        first = self._end + checked + _CHECK.size
        if len(head) < checked + _CHECK.size or first + count > size:
            return None
        name = head[_HEAD.size : checked]
        if _CHECK.unpack_from(head, checked)[0] != zlib.crc32(head[:checked]):
            raise self._damaged("the head of a frame has another checksum")
        if not _NAME.fullmatch(name) or any(not one.strip(b".") for one in name.split(b"/")):
            raise self._damaged(f"a frame has the name {printable(name.decode(errors='replace'))[:80]!r}")
        self._num_frames += 1
        if self._num_frames > MOST_FRAMES:
            raise self._damaged(f"it has more than {MOST_FRAMES} frames")
        return name.decode(), _Frame(self._name, first, count)

    def _damaged(self, what: str) -> Exception:
        return damaged(self._folder.path(self._name), f"at byte {self._end}, {what}")


class NodeFiles:
    """A local directory in which ranks have no directories: theirs are in the files of nodes.

    It has the methods of fsspec that `Folder` calls. Files beside those of nodes are seen as they are.

    Args:
        root: The directory.
    """

    def __init__(self, root: str) -> None:
        self._root = root
        self._folder = Folder.of(root)
        self._nodes: dict[str, _Node] = {}
        self._entries: dict[str, dict[str, _Frame | None]] = {"": {}}  # by directory; None for a directory in it

    def exists(self, path: str) -> bool:
        """True if there is a file or a directory."""
        return self.isdir(path) or self._found(path) is not None or self._folder.exists(self._within(path))

    def isdir(self, path: str) -> bool:
        """True if there is a directory."""
        name = self._within(path)
        return os.path.isdir(path) if not name else self._has(name)  # noqa: PTH112  as `LocalFiles`

    def ls(self, path: str, *, detail: bool = True) -> list[Any]:
        """The entries of a directory as they are now: their paths, or what `info` says of them."""
        self._look()
        name = self._within(path)
        if not self._has(name):
            raise FileNotFoundError(path)
        entries = {} if name else {
            one: size for one, size in self._folder.sizes().items() if not NODE.fullmatch(one)
        }  # fmt: skip
        entries |= {one: -1 if found is None else found.size for one, found in self._entries[name].items()}
        return [
            {"name": posixpath.join(path, one), "size": max(size, 0), "type": "directory" if size < 0 else "file"}
            if detail
            else posixpath.join(path, one)
            for one, size in entries.items()
        ]

    def info(self, path: str) -> dict[str, Any]:
        """Size and kind of a file."""
        found = self._found(path)
        name = self._within(path)
        if found is None and not self._folder.exists(name):
            raise FileNotFoundError(path)
        return {"name": path, "size": self._folder.size(name) if found is None else found.size, "type": "file"}

    def cat_file(self, path: str, start: int = 0, end: int | None = None) -> bytes:
        """A range of a file."""
        found, name = self._found(path), self._within(path)
        node, first, size = (name, 0, self._folder.size(name)) if found is None else found
        begin, stop = min(start, size), size if end is None else min(end, size)
        return self._folder.read_range(node, first + begin, max(0, stop - begin)).tobytes()

    def cat_ranges(
        self, paths: Sequence[str], starts: Sequence[int], ends: Sequence[int], *, on_error: str
    ) -> list[Any]:
        """Several ranges."""
        assert on_error == "return"
        return [self.cat_file(path, start, end) for path, start, end in zip(paths, starts, ends, strict=True)]

    def _within(self, path: str) -> str:
        return "" if path == self._root else path.removeprefix(f"{self._root.rstrip('/')}/")

    def _has(self, directory: str) -> bool:
        if directory not in self._entries:
            self._look()
        return directory in self._entries

    def _found(self, path: str) -> _Frame | None:
        """The frame of a file; None if no file of a node has it."""
        directory, _, name = self._within(path).rpartition("/")
        if directory and name not in self._entries.get(directory, {}):
            self._look()
        return self._entries.get(directory, {}).get(name) if directory else None

    def _look(self) -> None:
        """Read what nodes have added to their files."""
        for name in self._folder.names():
            if NODE.fullmatch(name) and name not in self._nodes:
                self._nodes[name] = _Node(self._folder, name)
        for node in self._nodes.values():
            for path, one in node.further():
                directory, _, name = path.rpartition("/")
                self._make(directory)
                self._entries[directory][name] = one

    def _make(self, directory: str) -> None:
        """Note a directory and those that it is in."""
        while directory:
            self._entries.setdefault(directory, {})
            above, _, name = directory.rpartition("/")
            self._entries.setdefault(above, {}).setdefault(name, None)
            directory = above


def with_nodes(file_system: Any, root: str) -> Any:
    """The file system of a recording: one that shows what the files of nodes hold, if there are any."""
    if isinstance(file_system, LocalFiles) and file_system.isdir(root):
        with os.scandir(root) as entries:
            if any(NODE.fullmatch(one.name) for one in entries):
                return NodeFiles(root)
    return file_system
