"""The files of a rank on an object store: the counterpart of `WrittenFiles`, where nothing can be appended."""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from traindiff.storage.location import segment_name
from traindiff.storage.stores import Store
from traindiff.storage.uploads import Piece, UploadError, Uploads
from traindiff.storage.written_files import Lost

JOINED = 64
"""As many successive segments of one size class become one."""

SEGMENT_BYTES = 32 * 2**20
"""A segment that has become as long is not joined with others any more; shorter ones are kept in memory for that."""

_logger = logging.getLogger("traindiff")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Uploaded:
    """A segment that may still be joined; `level` counts how often that has happened to its parts."""

    first: int
    messages: bytes
    seals: bytes
    level: int


class StoredFiles:
    """Makes the files of one rank on an object store. Everything is uploaded by a thread, in its order.

    The stream is stored as segments, each with the messages that waited together, and their seals. Every `JOINED`-th
    upload joins the segments before it: it uploads their messages too, and then removes them. So there are few
    segments, and no step ever waits for others to be safe. Only segments shorter than `SEGMENT_BYTES` are joined.

    Args:
        store: The file system.
        directory: Directory of the rank in it.
    """

    is_local = False

    def __init__(self, store: Store, directory: str) -> None:
        self._store = store
        self._directory = directory
        self._sizes: dict[str, int] = {}
        self._end = 0
        self._open: list[_Uploaded] = []
        self._joins = True
        self._is_last = False
        self.uploads = Uploads(self._upload)

    def append(self, seal: bytes, message: bytes, step: int | None, optimizer: str) -> None:
        """Have a message uploaded.

        Raises:
            UploadError: It, or an earlier piece, could not be uploaded.
        """
        self.uploads.put(Piece(content=message, seal=seal, step=step, optimizer=optimizer))

    def put(self, path: str, content: bytes) -> None:
        """Have a file uploaded, or replaced: a reader sees the old one or the new one, never a part.

        Raises:
            UploadError: It, or an earlier piece, could not be uploaded.
        """
        self.uploads.put(Piece(path=path, content=content))

    def put_in_folder(self, path: str, content: bytes, *, step: int, optimizer: str) -> None:
        """Have a file uploaded that belongs to a step, and that readers open once a message names it.

        Raises:
            UploadError: It, or an earlier piece, could not be uploaded.
        """
        self.uploads.put(Piece(path=path, content=content, step=step, optimizer=optimizer))

    def put_last(self, path: str, content: bytes) -> None:
        """Upload a file after everything that waits; if that has failed, at once, and tried once only.

        Raises:
            OSError: It could not be uploaded.
        """
        try:
            self.put(path, content)
        except UploadError:
            self._store.put_files({path: content})

    def begin(self) -> None:
        """Wait until the first files are uploaded, so that errors show before the training begins.

        Raises:
            UploadError: They could not be uploaded.
        """
        self.uploads.flush()

    def end(self) -> None:
        """Wait until everything is uploaded. Nothing can be appended after that.

        Raises:
            UploadError: Something could not be uploaded.
        """
        self._is_last = True
        self.uploads.flush()

    def lost(self) -> Lost | None:
        """None: a store is only asked at the end."""
        return None

    def lost_at_the_end(self) -> Lost | None:
        """The first file that is missing or has become shorter, when everything is uploaded."""
        there: dict[str, int] = {}
        for folder in dict.fromkeys(posixpath.dirname(path) for path in self._sizes):
            with suppress(FileNotFoundError):
                listed = self._store.ls(folder, detail=True)
                there |= {one["name"].lstrip("/"): int(one["size"] or 0) for one in listed}
        for path, size in self._sizes.items():
            found = there.get(path.lstrip("/"), -1)
            if found < size:
                found = self._size_of(path)
            if found < 0:
                return Lost(path=path, message=f"{path} is no longer there: it was moved or deleted")
            if found < size:
                message = f"{path} holds {found:,} of the {size:,} bytes that were written: it was cut short"
                return Lost(path=path, message=message)
        return None

    def _size_of(self, path: str) -> int:
        """The size of a file that a list lacks, or has with another size; -1 if there is none.

        Some stores list what was just written only later.
        """
        self._store.forget()
        try:
            return int(self._store.size(path))
        except FileNotFoundError:
            return -1

    def discard(self) -> None:
        """Remove what was uploaded, as far as possible."""
        self.uploads.close()
        self._remove(list(self._sizes))

    def close(self) -> None:
        """End the thread that uploads."""
        self.uploads.close()

    def _upload(self, pieces: list[Piece]) -> None:
        """Upload pieces: files first, since messages name them, then all messages as one segment."""
        files = {piece.path: piece.content for piece in pieces if piece.path}
        if files:
            self._store.put_files(files)
            self._sizes |= {path: len(content) for path, content in files.items()}
        messages = [piece for piece in pieces if not piece.path]
        if messages:
            self._upload_segment(b"".join(one.content for one in messages), b"".join(one.seal for one in messages))

    def _upload_segment(self, messages: bytes, seals: bytes) -> None:
        """Upload further messages, together with those of the segments that are due to be joined."""
        joined, level = self._due(len(messages))
        one = _Uploaded(
            first=joined[0].first if joined else self._end,
            messages=b"".join(part.messages for part in joined) + messages,
            seals=b"".join(part.seals for part in joined) + seals,
            level=level,
        )
        path, content = self._path(one), one.messages + one.seals
        self._store.put_files({path: content})
        self._sizes[path] = len(content)
        self._end += len(messages)
        del self._open[len(self._open) - len(joined) :]
        self._open = [] if len(one.messages) >= SEGMENT_BYTES else [*self._open, one]
        self._remove([self._path(part) for part in joined])

    def _due(self, num_bytes: int) -> tuple[list[_Uploaded], int]:
        """The latest segments to join with so many new bytes, and the level of the result."""
        if not self._joins:
            return [], 0
        if self._is_last or sum(len(one.messages) for one in self._open) + num_bytes >= SEGMENT_BYTES:
            return self._open[:], 0
        level, begin = 0, len(self._open)
        while begin >= JOINED - 1 and all(one.level == level for one in self._open[begin - JOINED + 1 : begin]):
            level, begin = level + 1, begin - JOINED + 1
        return self._open[begin:], level

    def _path(self, one: _Uploaded) -> str:
        return posixpath.join(self._directory, segment_name(one.first, len(one.messages)))

    def _remove(self, paths: Sequence[str]) -> None:
        """Remove files that are not needed. Without the right to do that, segments are not joined any more."""
        if not paths:
            return
        for path in paths:
            self._sizes.pop(path, None)
        try:
            self._store.rm(list(paths))
        except Exception:
            _logger.debug("joined segments could not be removed", exc_info=True)
            self._joins = False
            self._open = []
