"""An S3 server of this process, which can be told to fail: moto's, behind a layer that fails on request."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

Fault = Callable[[Mapping[str, Any]], tuple[str, bytes] | None]
"""Given a request, an HTTP status and a body to answer with; or None after it has done what it does."""

BUCKET = "recordings"


def answering(status: str, code: str) -> Fault:
    """A fault: every request is answered with an error of S3."""
    return lambda _: (status, f"<Error><Code>{code}</Code><Message>{code} on purpose</Message></Error>".encode())


def cut(request: Mapping[str, Any]) -> None:
    """A fault: the connection is closed without an answer."""
    request["werkzeug.socket"].shutdown(2)


@dataclass(slots=True)
class S3Server:
    """The server.

    Attributes:
        endpoint: Its URL.
        faults: Faults for the next requests, one each.
        always: The fault of every request, if there is one.
        requests: Method, path and range of each request so far.
    """

    endpoint: str = ""
    faults: list[Fault] = field(default_factory=list)
    always: Fault | None = None
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    app: Any = None

    def __call__(self, request: Mapping[str, Any], respond: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request (WSGI)."""
        self.requests.append((request["REQUEST_METHOD"], request["PATH_INFO"], request.get("HTTP_RANGE", "")))
        fault = self.faults.pop(0) if self.faults else self.always
        said = fault(request) if fault else None
        if said is None:
            return self.app(request, respond)  # type: ignore[no-any-return]
        request["wsgi.input"].read(int(request.get("CONTENT_LENGTH") or 0))
        body = b"" if request["REQUEST_METHOD"] == "HEAD" else said[1]
        respond(said[0], [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]


@contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server with one bucket, for which the AWS_* variables are set."""
    fsspec = pytest.importorskip("fsspec")
    pytest.importorskip("s3fs", reason="needs s3fs (the extra dev)")
    pytest.importorskip("moto", reason="needs moto (the extra dev)")
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    server = S3Server(app=DomainDispatcherApplication(create_backend_app))
    http = make_server("127.0.0.1", 0, server, threaded=True)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    server.endpoint = f"http://127.0.0.1:{http.port}"
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": server.endpoint, "AWS_CONFIG_FILE": "/nonexistent", "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    request = urllib.request.Request(f"{server.endpoint}/moto-api/reset", method="POST")  # moto keeps its buckets
    urllib.request.urlopen(request).close()
    fsspec.filesystem("s3").clear_instance_cache()
    fsspec.filesystem("s3").mkdir(BUCKET)
    server.requests.clear()
    try:
        yield server
    finally:
        fsspec.filesystem("s3").clear_instance_cache()
        http.shutdown()
        http.server_close()
        thread.join()
