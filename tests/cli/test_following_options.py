"""What `check` and `compare` do with a verdict: send it, write it, and end as ever."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from tests.made_up import FC, record, scaled
from traindiff.cli.commands import app


@contextmanager
def web_server(status: int = 200) -> Iterator[tuple[str, list[Any]]]:
    """Its address, and what it was sent."""
    sent: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hook", sent
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_verdict_is_sent_and_written(tmp_path: Path) -> None:
    paths = [str(record(tmp_path / "base")), str(record(tmp_path / "other", scaled(FC, 0.5)))]
    with web_server() as (url, sent):
        options = ["--follow", "--webhook", url, "--junit", str(tmp_path / "found.xml")]
        result = CliRunner().invoke(app, ["compare", *paths, *options])

    (found,) = sent
    assert result.exit_code == 1
    assert found["result"]["verdict"] == "diverged"
    assert found["result"]["steps"] == [0]
    assert found["text"].startswith("diverged")
    suites = ElementTree.parse(tmp_path / "found.xml").getroot()
    assert [one.tag for one in suites.iter("failure")] != []


def test_a_check_is_sent_too(tmp_path: Path) -> None:
    with web_server() as (url, sent):
        result = CliRunner().invoke(app, ["check", str(record(tmp_path / "run")), "--webhook", url])

    assert result.exit_code == 0
    assert sent[0]["text"].startswith("healthy")


def test_a_verdict_that_cannot_be_sent_is_still_one(tmp_path: Path) -> None:
    path = str(record(tmp_path / "run"))
    with web_server(status=500) as (url, _):
        refused = CliRunner().invoke(app, ["check", path, "--webhook", url])
    away = CliRunner().invoke(app, ["check", path, "--webhook", url])

    for result in (refused, away):
        assert result.exit_code == 0
        assert "healthy" in result.stdout
        assert f"nothing was sent to {url}: " in result.stderr


@contextmanager
def odd_server(answer: bytes) -> Iterator[str]:
    """The address of a server that answers everything with these bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/hook"
        thread.join()


@pytest.mark.parametrize("answer", [b"hello\r\n\r\n", b"HTTP/1.1 200 OK\r\nX: " + b"y" * 70_000 + b"\r\n\r\n", b""])
def test_an_answer_that_is_no_http_changes_no_verdict(tmp_path: Path, answer: bytes) -> None:
    with odd_server(answer) as url:
        result = CliRunner().invoke(app, ["check", str(record(tmp_path / "run")), "--webhook", url])

    assert result.exit_code == 0, result.exception
    assert "healthy" in result.stdout
    assert f"nothing was sent to {url}: " in result.stderr
    assert len(result.stderr) < 400


def test_a_file_that_cannot_be_written_in_the_end_changes_no_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, junit, write = str(record(tmp_path / "run")), tmp_path / "found.xml", Path.open

    def full(self: Path, *arguments: Any, **how: Any) -> Any:
        if self == junit:
            raise OSError(28, "No space left on device")
        return write(self, *arguments, **how)

    monkeypatch.setattr(Path, "open", full)
    with web_server() as (url, sent):
        result = CliRunner().invoke(app, ["check", path, "--junit", str(junit), "--webhook", url])
    assert result.exit_code == 0
    assert "was not written: No space left on device" in result.stderr
    assert len(sent) == 1


@pytest.mark.parametrize("arguments", ["check run", "compare run run"])
def test_a_verdict_is_handed_on_although_nobody_reads_what_is_printed(tmp_path: Path, arguments: str) -> None:
    record(tmp_path / "run")
    command = f"{sys.executable} -m traindiff {arguments} --junit found.xml | exec <&-"
    subprocess.run(["bash", "-c", command], capture_output=True, cwd=tmp_path, timeout=120, check=True)

    assert ElementTree.parse(tmp_path / "found.xml").getroot().tag == "testsuites"


def test_what_cannot_be_an_address_or_a_file_is_refused_at_once(tmp_path: Path) -> None:
    path = str(record(tmp_path / "run"))
    for options, what in (
        (["--webhook", "file:///etc/passwd"], "is no address of a web server"),
        (["--webhook", "https://"], "is no address of a web server"),
        (["--webhook", "http://[::1/"], "is no address of a web server"),
        (["--webhook", "http://127.0.0.1:abc/"], "is no address of a web server"),
        (["--webhook", "http://localhost/a b"], "is no address of a web server"),
        (["--webhook", "http://exa mple.com/"], "is no address of a web server"),
        (["--junit", str(tmp_path)], "is a directory"),
        (["--junit", str(tmp_path / "no" / "found.xml")], "is in a directory that does not exist"),
    ):
        result = CliRunner().invoke(app, ["check", path, *options])
        assert result.exit_code == 2
        assert what in result.stderr
        assert result.stdout == ""


@pytest.mark.parametrize("command", ["check", "compact", "prune"])
def test_patience_is_for_a_run_that_is_followed(command: str, tmp_path: Path) -> None:
    refused = CliRunner().invoke(app, [command, str(record(tmp_path / "run")), "--patience", "3"])

    assert refused.exit_code == 2
    assert "--patience\n    is for a run that goes on, and there is no --follow." in refused.stderr
