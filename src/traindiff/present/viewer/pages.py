"""The pages of a directory's recordings. Each is written by a process of its own, and kept for a while.

A recording that takes forever, or that crashes its reader, then costs its own page only.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from tempfile import TemporaryFile
from threading import Condition, Thread
from urllib.parse import quote

from traindiff.analyse.check import check
from traindiff.analyse.compare import compare
from traindiff.core.untrusted.local_files import LocalFiles
from traindiff.errors import TraindiffError
from traindiff.present.page import page_of, write
from traindiff.present.viewer.catalog import Catalog, Recordings
from traindiff.present.viewer.stored_catalog import StoredCatalog
from traindiff.storage import open_recording
from traindiff.storage.location import file_system

NO_PAGE = 3
"""Exit code of a process that wrote no page: its standard output has the HTTP status and a message, as JSON."""

NO_SUCH_RECORDING = "There is no such recording under the directory."


def catalog_of(root: str | Path) -> Recordings:
    """The recordings under a directory, or under a URL."""
    if isinstance(root, str) and "://" in root:
        files, path = file_system(root)
        return Catalog(Path(path)) if isinstance(files, LocalFiles) else StoredCatalog(root)
    return Catalog(Path(root))


def states_of(catalog: Recordings, names: Sequence[str]) -> str:
    """The states of recordings, by their names in an address, as a text that changes when one of them does."""
    return "\n".join(map(catalog.state, names))


def written(catalog: Recordings, names: Sequence[str]) -> str:
    """The page of one recording, or of the comparison of two, by their names in an address.

    Raises:
        FileNotFoundError: There is no such recording.
        TraindiffError: A recording cannot be used.
    """
    paths = [str(path) for name in names if (path := catalog.find(name)) is not None]
    if len(paths) < len(names):
        raise FileNotFoundError
    known = states_of(catalog, names)  # before anything is read: what is written meanwhile is news
    result = check(paths[0], history=True) if len(paths) == 1 else compare(paths[0], paths[1], history=True)
    endings = {one.status(rank).ending for one in map(open_recording, paths) for rank in one.ranks}
    asks = "&".join(f"of={quote(os.fsencode(name), safe='')}" for name in names)
    refresh = f"/state?{asks}" if endings & {"unclosed", "truncated"} else ""
    file = io.StringIO()
    write(page_of(result), file, home="/", refresh=refresh, known=known if refresh else "")
    return file.getvalue()


def main(root: str, names: Sequence[str]) -> int:
    """Write the page of these recordings under `root` to standard output; return the exit code."""
    Thread(target=_end_with_parent, daemon=True).start()
    code = NO_PAGE
    try:
        text, code = written(catalog_of(root), names), 0
    except FileNotFoundError:
        text = _no_page(HTTPStatus.NOT_FOUND, NO_SUCH_RECORDING)
    except (TraindiffError, OSError) as error:
        text = _no_page(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
    except Exception as error:  # noqa: BLE001  whatever a damaged recording does, there is an answer
        message = f"This could not be read: {type(error).__name__}: {error}"
        text = _no_page(HTTPStatus.INTERNAL_SERVER_ERROR, message)
    sys.stdout.buffer.write(text.encode(errors="replace"))  # a name may be no UTF-8
    sys.stdout.buffer.flush()
    return code


def _no_page(status: HTTPStatus, message: str) -> str:
    return json.dumps({"status": status, "message": message})


def _end_with_parent() -> None:
    """End this process when the server ends, which holds the other end of standard input."""
    while os.read(0, 1):  # a buffered file could not be let go of at exit
        pass
    os._exit(1)


KEPT = 8
"""Pages that are kept, so that opening one again computes nothing."""

AT_ONCE = 2
"""Pages that are written at the same time at most: each reads whole recordings."""

WAIT_SECONDS = 10.0
"""Time that a request waits for its page. A later request finds what is ready by then."""

LIMIT_SECONDS = 900.0
"""Time that writing a page may take."""

FORGOTTEN_SECONDS = 60.0
"""Time after the last request for a page until its process is ended."""

MOST_BYTES = 1 << 26
"""Largest size of a page: pages are kept in memory."""

START = (
    "import os, sys; sys.path[:] = sys.argv.pop(1).split(os.pathsep); "
    "from traindiff.present.viewer.pages import main; sys.exit(main(sys.argv[1], sys.argv[2:]))"
)
"""The program that writes a page. It imports from the same places as this process, not from its directory."""

_Key = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to a request for a page.

    Attributes:
        status: The HTTP status.
        content: The page; empty if there is none.
        message: The message in place of a page.
    """

    status: HTTPStatus
    content: bytes = b""
    message: str = ""


@dataclass(slots=True, kw_only=True)
class _Job:
    """A page that is being written."""

    asked: float
    answer: Answer | None = None
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)


class Pages:
    """Pages of one recording, or of two. Each is written once for each state of the recordings."""

    def __init__(self, catalog: Recordings) -> None:
        self._catalog = catalog
        self._done: OrderedDict[_Key, Answer] = OrderedDict()
        self._jobs: dict[_Key, _Job] = {}
        self._changed = Condition()
        self._closed = False

    def page(self, names: tuple[str, ...]) -> Answer:
        """The page of recordings, by their names in an address.

        Waits for it for a while; after that it has to be asked for again.
        """
        states = tuple(map(self._catalog.state, names))
        if "gone" in states:
            return Answer(status=HTTPStatus.NOT_FOUND, message=NO_SUCH_RECORDING)
        key = (*names, *states)
        until = time.monotonic() + WAIT_SECONDS
        with self._changed:
            while True:
                now = time.monotonic()
                if key in self._done:
                    return self._given(key)
                if key not in self._jobs and len(self._jobs) < AT_ONCE and not self._closed:
                    self._jobs[key] = _Job(asked=now)
                    Thread(target=self._run, args=(key, names), daemon=True).start()
                if key in self._jobs:
                    self._jobs[key].asked = now
                if now >= until:
                    return Answer(status=HTTPStatus.SERVICE_UNAVAILABLE, message="This page is being prepared.")
                self._changed.wait(min(until - now, 0.5))  # who waits has not forgotten

    def close(self) -> None:
        """End all processes, and start no others."""
        with self._changed:
            self._closed = True
            for job in self._jobs.values():
                if job.process is not None:
                    job.process.kill()

    def _given(self, key: _Key) -> Answer:
        """A finished answer. A failure is given once, and tried again the next time."""
        answer = self._done[key]
        if answer.status is HTTPStatus.OK:
            self._done.move_to_end(key)
        else:
            del self._done[key]
        return answer

    def _run(self, key: _Key, names: tuple[str, ...]) -> None:
        """Write a page, on a thread of its own."""
        job = self._jobs[key]
        try:
            answer = self._written(job, names)
        except OSError as error:
            answer = Answer(status=HTTPStatus.INTERNAL_SERVER_ERROR, message=f"No process could be started: {error}")
        with self._changed:
            del self._jobs[key]
            if answer is not None:
                self._done[key] = answer
            while len(self._done) > KEPT:
                self._done.popitem(last=False)
            self._changed.notify_all()

    def _written(self, job: _Job, names: tuple[str, ...]) -> Answer | None:
        """The answer of the process; None where nobody wants it any more."""
        path = os.pathsep.join(filter(None, sys.path))
        command = [sys.executable, "-P", "-c", START, path, str(self._catalog.root), *names]
        until = time.monotonic() + LIMIT_SECONDS
        with TemporaryFile() as page:
            with self._changed:
                if self._closed:
                    return None
                job.process = process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=page, stderr=subprocess.DEVNULL
                )  # fmt: skip
            with process:
                while not _has_ended(process):
                    now = time.monotonic()
                    if now > min(until, job.asked + FORGOTTEN_SECONDS):
                        process.kill()
                        return _TOO_LONG if now > until else None
                    if os.fstat(page.fileno()).st_size > MOST_BYTES:
                        process.kill()
            if page.seek(0, os.SEEK_END) > MOST_BYTES:
                return _TOO_LARGE
            page.seek(0)
            return None if self._closed else _read(process.returncode, page.read())


_TOO_LONG = Answer(
    status=HTTPStatus.GATEWAY_TIMEOUT,
    message=f"Writing this page took longer than {LIMIT_SECONDS:g} seconds. "
    "traindiff report takes as long as it needs.",
)
_TOO_LARGE = Answer(
    status=HTTPStatus.UNPROCESSABLE_ENTITY,
    message=f"This page would have more than {MOST_BYTES >> 20} MiB. traindiff report writes it to a file.",
)


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout=0.5)
    except subprocess.TimeoutExpired:
        return False
    return True


def _read(code: int, data: bytes) -> Answer:
    if code == 0:
        return Answer(status=HTTPStatus.OK, content=data)
    if code == NO_PAGE:
        found = json.loads(data)
        return Answer(status=HTTPStatus(found["status"]), message=found["message"])
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    message = f"This could not be read: the process that read it ended with {how}."
    return Answer(status=HTTPStatus.INTERNAL_SERVER_ERROR, message=message)
