"""The server behind `traindiff view`: on this machine only, and read-only."""

from __future__ import annotations

import io
import socket
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Condition
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from traindiff.errors import TraindiffError
from traindiff.present.viewer.catalog import Recordings, message_page
from traindiff.present.viewer.listing import Listing
from traindiff.present.viewer.looks import Looks
from traindiff.present.viewer.pages import Answer, Pages, catalog_of, states_of

PATIENCE_SECONDS = 1.0
"""Time that a new connection waits until the thread of a closed one has ended."""


class Connections:
    """The connections that are being answered, each by a thread of its own.

    A client that connects and sends nothing must not keep others out. If there are too many connections, the one that
    has been sending its request for the longest time is therefore closed.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._sending: OrderedDict[socket.socket, None] = OrderedDict()
        self._changed = Condition()

    def admit(self, connection: socket.socket) -> bool:
        """Count a new connection, which is about to send its request; False if all others wait for their answers."""
        with self._changed:
            if self._count >= self._most and self._sending:
                oldest, _ = self._sending.popitem(last=False)
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
                self._changed.wait_for(lambda: self._count < self._most, PATIENCE_SECONDS)
            if self._count >= self._most:
                return False
            self._count += 1
            self._sending[connection] = None
            return True

    def has_sent(self, connection: socket.socket) -> None:
        """Note that the request of a connection is complete: from now on the client waits for the answer."""
        with self._changed:
            self._sending.pop(connection, None)

    def leave(self, connection: socket.socket) -> None:
        """Note that a connection has ended."""
        with self._changed:
            self._sending.pop(connection, None)
            self._count -= 1
            self._changed.notify_all()


ADDRESS = "127.0.0.1"

MOST_CONNECTIONS = 32
"""Most connections at the same time, each with a thread."""

REQUEST_SECONDS = 5.0
"""Time that a client may take to send its request."""

REQUEST_BYTES = 16_384
"""Largest size of a request, with all its headers."""

SEND_SECONDS = 60.0
"""Time that a client may take to receive its answer."""

RETRY_SECONDS = 2
"""Time after which a browser asks again for a page that is being prepared."""

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

    It listens on 127.0.0.1, writes nothing, and reads nothing outside the directory. It answers only requests for that
    host, because the name of another site may resolve to this address. One client or recording cannot block the others:
    the number of connections, their time, and the size of a request are limited, and separate processes write the
    pages.

    Args:
        root: The directory, or the URL of one on a store.
        port: The port; 0 for any free port.

    Raises:
        OSError: The port is in use.
    """

    def __init__(self, root: Path | str, *, port: int = 0) -> None:
        self.catalog = catalog_of(root)
        self._server = _Server((ADDRESS, port), _Handler)
        self._server.catalog = self.catalog
        self._server.pages = Pages(self.catalog)
        self._looks = Looks(str(self.catalog.root))
        self._server.listing = Listing(self.catalog, self._looks)
        names = (ADDRESS, "localhost")
        hosts = {f"{name}:{self.port}" for name in names} | (set(names) if self.port == 80 else set())
        self._server.hosts = frozenset(hosts)

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self._server.server_address[1])

    @property
    def address(self) -> str:
        """The address to open in a browser."""
        return f"http://{ADDRESS}:{self.port}/"

    def serve(self) -> None:
        """Answer requests, until `close` is called from elsewhere."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """Stop answering, and release the port. Pages that are being written are not waited for."""
        self._server.shutdown()
        self._server.server_close()
        self._server.pages.close()
        self._looks.close()


class _Server(ThreadingHTTPServer):
    """A server with a thread for each connection, and a bound on their number."""

    daemon_threads = True  # the program ends without them
    request_queue_size = 128
    catalog: Recordings
    pages: Pages
    listing: Listing
    hosts: frozenset[str]

    def __init__(self, *args: Any) -> None:
        self.connections = Connections(MOST_CONNECTIONS)
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection on a thread of its own, if there is room."""
        if not self.connections.admit(request):
            with suppress(OSError):
                request.settimeout(0)
                request.send(b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: %d\r\n\r\n" % RETRY_SECONDS)
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self.connections.leave(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.connections.leave(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: a client that has gone is not our error."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    server_version = "traindiff"
    sys_version = ""

    def setup(self) -> None:
        """Read the request, whole and in time."""
        super().setup()
        self.rfile.close()
        self.rfile = io.BytesIO(self._received())
        self.server.connections.has_sent(self.connection)
        self.connection.settimeout(SEND_SECONDS)

    def _received(self) -> bytes:
        """The request with its headers; empty where its end does not come, or it is larger than requests are."""
        data = b""
        until = time.monotonic() + REQUEST_SECONDS
        with suppress(OSError):
            while len(data) <= REQUEST_BYTES and (left := until - time.monotonic()) > 0:
                if b"\r\n\r\n" in data or b"\n\n" in data:
                    return data
                self.connection.settimeout(left)
                if not (part := self.connection.recv(REQUEST_BYTES)):
                    break
                data += part
        return b""

    def do_GET(self) -> None:
        """Answer with a page."""
        if not self._is_for_us():
            message = "This server answers for 127.0.0.1 only."
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, message_page(message).encode())
            return
        content_type = "text/html"
        try:
            found = self._content()
            if found is None:
                found = Answer(status=HTTPStatus.NOT_FOUND, message="There is nothing at this address.")
            elif isinstance(found, str):
                found, content_type = Answer(status=HTTPStatus.OK, content=found.encode(errors="replace")), "text/plain"
        except (TraindiffError, OSError) as error:
            found = Answer(status=HTTPStatus.UNPROCESSABLE_ENTITY, message=str(error))
        except Exception as error:  # noqa: BLE001  whatever a damaged recording does, there is an answer
            message = f"This could not be read: {type(error).__name__}: {error}"
            found = Answer(status=HTTPStatus.INTERNAL_SERVER_ERROR, message=message)
        again = RETRY_SECONDS if found.status is HTTPStatus.SERVICE_UNAVAILABLE else 0
        content = found.content or message_page(found.message, again=again).encode(errors="replace")
        self._answer(found.status, content, content_type=content_type, again=again)

    def _content(self) -> Answer | str | None:
        """The content at the address: a page, a plain text, or nothing."""
        parts = urlsplit(self.path)
        asked = parse_qs(parts.query, errors="surrogateescape")
        if parts.path == "/":
            baseline, search = (asked.get(name, [""])[0] for name in ("baseline", "search"))
            page = self.server.listing.write(baseline=baseline, search=search)
            return Answer(status=HTTPStatus.OK, content=page.encode(errors="replace"))  # a name may be no UTF-8
        if parts.path.startswith("/run/"):
            name = unquote(parts.path.removeprefix("/run/"), errors="surrogateescape")
            return self.server.pages.page((name,))
        if parts.path == "/compare" and "baseline" in asked and "candidate" in asked:
            return self.server.pages.page((asked["baseline"][0], asked["candidate"][0]))
        if parts.path == "/state":
            return states_of(self.server.catalog, asked.get("of", [])[:2])
        return None

    do_HEAD = do_GET  # noqa: N815  the name that the base class calls

    def _is_for_us(self) -> bool:
        """True if the request names this host. A page elsewhere whose name leads here must learn nothing."""
        return self.headers.get("Host", "").lower() in self.server.hosts

    def _answer(
        self, status: HTTPStatus, content: bytes, *, content_type: str = "text/html", again: int = 0
    ) -> None:  # fmt: skip
        with suppress(OSError):  # nobody waits for it any more
            self.send_response(status)
            for name, value in HEADERS.items():
                self.send_header(name, value)
            if again:
                self.send_header("Retry-After", str(again))
            self.send_header("Content-Type", f"{content_type}; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the name that it overrides
        """Print nothing: the page says what went wrong."""
