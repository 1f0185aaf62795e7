"""The server behind `traindiff view`: on this machine only, and read-only."""

from __future__ import annotations

import io
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from traindiff.comparison import compare
from traindiff.errors import TraindiffError
from traindiff.health import check
from traindiff.recording import open_recording
from traindiff.report.page import page_of, write
from traindiff.viewer.catalogue import Catalogue
from traindiff.viewer.listing import message_page, write_listing

ADDRESS = "127.0.0.1"

KEPT = 8
"""Pages that are kept, so that looking again computes nothing."""

HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Viewer:
    """Serves reports of the recordings under a directory, until it is closed.

    It listens on 127.0.0.1, answers requests that were made for that host and no other (a name of another site may
    lead to this address), writes nothing, and reads nothing outside the directory.

    Args:
        root: The directory.
        port: Where to listen; 0 for any that is free.

    Attributes:
        catalogue: What lies under the directory.

    Raises:
        OSError: The port is in use.
    """

    def __init__(self, root: Path, *, port: int = 0) -> None:
        self.catalogue = Catalogue(root)
        self._pages: OrderedDict[tuple[str, ...], str] = OrderedDict()
        self._lock = Lock()
        viewer = self

        class Handler(_Handler):
            catalogue = viewer.catalogue
            page = staticmethod(viewer._page)

        self._server = ThreadingHTTPServer((ADDRESS, port), Handler)
        self._server.daemon_threads = True
        Handler.hosts = frozenset(f"{name}:{self.port}" for name in (ADDRESS, "localhost"))

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    @property
    def address(self) -> str:
        """What to open in a browser."""
        return f"http://{ADDRESS}:{self.port}/"

    def serve(self) -> None:
        """Answer requests, until `close` is called from elsewhere."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """Stop answering, and let go of the port."""
        self._server.shutdown()
        self._server.server_close()

    def _page(self, names: tuple[str, ...]) -> str:
        """The page of one recording, or of two; computed once for each state of them."""
        states = tuple(map(self.catalogue.state, names))
        with self._lock:  # one at a time: each reads whole recordings
            key = (*names, *states)
            if key not in self._pages:
                self._pages[key] = self._written(names)
            self._pages.move_to_end(key)
            while len(self._pages) > KEPT:
                self._pages.popitem(last=False)
            return self._pages[key]

    def _written(self, names: tuple[str, ...]) -> str:
        paths = [str(path) for name in names if (path := self.catalogue.find(name)) is not None]
        if len(paths) < len(names):
            raise FileNotFoundError
        result = check(paths[0], history=True) if len(paths) == 1 else compare(paths[0], paths[1], history=True)
        recordings = map(open_recording, paths)
        growing = any(one.status(rank).ending != "closed" for one in recordings for rank in one.ranks)
        file = io.StringIO()
        asks = "&".join(f"of={quote(os.fsencode(name), safe='')}" for name in names)
        write(page_of(result), file, home="/", refresh=f"/state?{asks}" if growing else "")
        return file.getvalue()


class _Handler(BaseHTTPRequestHandler):
    catalogue: Catalogue
    page: Callable[[tuple[str, ...]], str]
    hosts: frozenset[str]

    server_version = "traindiff"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer with a page."""
        if not self._is_for_us():
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, message_page("This server answers for 127.0.0.1 only."))
            return
        status, content_type = HTTPStatus.OK, "text/html"
        try:
            found = self._content()
            if found is None:
                status, text = HTTPStatus.NOT_FOUND, message_page("There is nothing at this address.")
            else:
                text, content_type = found
        except FileNotFoundError:
            status, text = HTTPStatus.NOT_FOUND, message_page("There is no such recording under the directory.")
        except (TraindiffError, OSError) as error:
            status, text = HTTPStatus.UNPROCESSABLE_ENTITY, message_page(str(error))
        except Exception as error:  # noqa: BLE001  whatever a damaged recording does, there is an answer
            says = f"This could not be read: {type(error).__name__}: {error}"
            status, text = HTTPStatus.INTERNAL_SERVER_ERROR, message_page(says)
        with suppress(ConnectionError):  # nobody waits for it any more
            self._answer(status, text, content_type=content_type)

    def _content(self) -> tuple[str, str] | None:
        """What is at the address, and its content type; None for nothing."""
        parts = urlsplit(self.path)
        asked = parse_qs(parts.query, errors="surrogateescape")
        if parts.path == "/":
            return write_listing(self.catalogue), "text/html"
        if parts.path.startswith("/run/"):
            name = unquote(parts.path.removeprefix("/run/"), errors="surrogateescape")
            return self.page((name,)), "text/html"
        if parts.path == "/compare" and "baseline" in asked and "candidate" in asked:
            return self.page((asked["baseline"][0], asked["candidate"][0])), "text/html"
        if parts.path == "/state":
            return "\n".join(map(self.catalogue.state, asked.get("of", ())[:2])), "text/plain"
        return None

    do_HEAD = do_GET  # noqa: N815  the name that the base class calls

    def _is_for_us(self) -> bool:
        """Whether the request names this host: a page elsewhere whose name leads here must learn nothing."""
        return self.headers.get("Host", "").lower() in self.hosts

    def _answer(self, status: HTTPStatus, text: str, *, content_type: str = "text/html") -> None:
        content = text.encode(errors="replace")  # a name may be no UTF-8
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{content_type}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the name that it overrides
        """Say nothing: what goes wrong is on the page."""
