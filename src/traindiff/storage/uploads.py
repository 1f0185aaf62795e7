"""Uploads to a store by a thread of its own: what waits is bounded, what fails is tried again."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from traindiff.storage.stores import StoreError

MOST_BYTES = 64 * 2**20
"""The most that waits to be uploaded, in bytes. Beyond it, the thread that writes waits."""

PAUSE_SECONDS = 1.0
"""The least time between the beginnings of two uploads, so that short steps share one."""

RETRY_SECONDS = 300.0
"""How long a failed upload is tried again, before the recording ends there."""

LASTING_SECONDS = 20.0
"""The same for errors that do not pass by themselves, such as expired credentials."""

_FIRST_WAIT_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 15.0
_logger = logging.getLogger("traindiff")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Something to upload: a file, or a message of the stream.

    Attributes:
        path: Path of the file; empty for a message.
        content: Its bytes.
        seal: The line of a message's seal; empty for a file.
        step: The step that the message belongs to; None if it belongs to none.
        optimizer: Whose step it is.
    """

    path: str = ""
    content: bytes
    seal: bytes = b""
    step: int | None = None
    optimizer: str = ""


class UploadError(OSError):
    """Something could not be uploaded, and nothing that came after it was.

    Attributes:
        step: The first step that is missing; None if that is not known.
        optimizer: Whose step it is.
        fix: What to do about it.
    """

    def __init__(self, error: BaseException, piece: Piece | None) -> None:
        said = error.what if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
        super().__init__(getattr(error, "errno", None) or errno.EIO, said)
        self.step = piece.step if piece else None
        self.optimizer = piece.optimizer if piece else ""
        self.fix = error.fix if isinstance(error, StoreError) else "Look into the store's own log."


class Uploads:
    """A queue of pieces that a thread uploads in their order, several at once.

    Nothing is uploaded after a failure. Until the first upload has succeeded, errors that do not pass by themselves
    are not tried again: then the recording has not begun.

    Args:
        upload: Uploads pieces, all or none: it may be called again with the same ones after an error.
        most_bytes: See `MOST_BYTES`. A larger piece waits alone.
        pause_seconds: See `PAUSE_SECONDS`.
        retry_seconds: See `RETRY_SECONDS`.
        lasting_seconds: See `LASTING_SECONDS`.
    """

    def __init__(
        self,
        upload: Callable[[list[Piece]], None],
        *,
        most_bytes: int = MOST_BYTES,
        pause_seconds: float = PAUSE_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
        lasting_seconds: float = LASTING_SECONDS,
    ) -> None:
        self._upload = upload
        self._most_bytes = most_bytes
        self._pause = pause_seconds
        self._retry = retry_seconds
        self._lasting = lasting_seconds
        self._has_begun = False
        self._waiting: deque[Piece] = deque()
        self._bytes = 0
        self._error: UploadError | None = None
        self._flushing = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, piece: Piece) -> None:
        """Have a piece uploaded after the ones before it; waits while too much is waiting.

        Raises:
            UploadError: An earlier piece could not be uploaded.
        """
        size = len(piece.content) + len(piece.seal)
        with self._changed:
            while self._error is None and self._bytes and self._bytes + size > self._most_bytes:
                self._changed.wait()
            self._raise_error()
            if self._thread is None:  # a daemon, so that a store that hangs does not keep the interpreter from exiting
                self._thread = threading.Thread(target=self._run, name="traindiff uploads", daemon=True)
                self._thread.start()
            self._waiting.append(piece)
            self._bytes += size
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until everything is uploaded.

        Raises:
            UploadError: Something could not be uploaded.
        """
        with self._changed:
            self._flushing += 1
            self._changed.notify_all()
            try:
                while self._waiting and self._error is None:
                    self._changed.wait()
            finally:
                self._flushing -= 1
            self._raise_error()

    def close(self) -> None:
        """End the thread; what still waits is dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise UploadError(self._error.__cause__ or self._error, _first_step(self._waiting)) from self._error

    def _run(self) -> None:
        began = -self._pause
        while pieces := self._next(began + self._pause):
            began = time.monotonic()
            try:
                self._persist(pieces)
            except BaseException as error:  # noqa: BLE001  told to whoever puts the next piece
                with self._changed:
                    self._error = UploadError(error, _first_step(self._waiting))
                    self._error.__cause__ = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._has_begun = True
                for piece in pieces:
                    self._waiting.popleft()
                    self._bytes -= len(piece.content) + len(piece.seal)
                self._changed.notify_all()

    def _next(self, not_before: float) -> list[Piece]:
        """What waits, when there is something and it is time; nothing after `close`."""
        with self._changed:
            while not self._closed:
                rest = not_before - time.monotonic()
                is_urgent = self._flushing or 2 * self._bytes > self._most_bytes
                if self._waiting and (rest <= 0 or is_urgent):
                    return list(self._waiting)
                self._changed.wait(rest if self._waiting else None)
        return []

    def _persist(self, pieces: list[Piece]) -> None:
        """Upload pieces, and try again as long as that may help."""
        began, wait = time.monotonic(), _FIRST_WAIT_SECONDS
        while True:
            try:
                self._upload(pieces)
                return
            except Exception as error:
                lasts = isinstance(error, StoreError) and error.lasts
                limit = self._retry if not lasts else self._lasting
                if not self._has_begun:
                    limit = 0.0 if lasts else min(limit, self._lasting)
                _logger.debug("an upload failed", exc_info=True)
                with self._changed:
                    if time.monotonic() + wait > began + limit or self._closed:
                        raise
                    self._changed.wait_for(lambda: self._closed, wait)
                wait = min(2 * wait, _LONGEST_WAIT_SECONDS)


def _first_step(pieces: deque[Piece]) -> Piece | None:
    return next((piece for piece in pieces if piece.step is not None), None)
