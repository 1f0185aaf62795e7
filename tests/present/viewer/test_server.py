"""Reports of the recordings under a directory, over HTTP on this machine."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread, active_count
from urllib.parse import quote

import pytest

from tests.made_up import FC, record, scaled
from tests.present.hostile import hostile
from tests.storage.hostile import change_columns
from traindiff.present.viewer import Viewer, looks, pages
from traindiff.present.viewer import server as served
from traindiff.storage import open_recording
from traindiff.storage.tensor_files import tensor_file


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with recordings, beside one that is none of them."""
    record(tmp_path / "secret")
    record(tmp_path / "root" / "baseline")
    record(tmp_path / "root" / "runs" / "candidate", scaled(FC, 1e-2, step=1))
    record(tmp_path / "root" / "runs" / "growing", close=False)
    return tmp_path / "root"


@pytest.fixture
def viewer(root: Path) -> Iterator[Viewer]:
    one = Viewer(root)
    thread = Thread(target=one.serve)
    thread.start()
    yield one
    one.close()
    thread.join()


Ask = Callable[..., tuple[http.client.HTTPResponse, str]]


@pytest.fixture
def ask(viewer: Viewer) -> Ask:
    """Send a request as it is, and read the answer."""

    def run(path: str, *, method: str = "GET", host: str | None = None) -> tuple[http.client.HTTPResponse, str]:
        connection = http.client.HTTPConnection("127.0.0.1", viewer.port, timeout=60)
        connection.putrequest(method, path, skip_host=True)
        if host != "":
            connection.putheader("Host", f"127.0.0.1:{viewer.port}" if host is None else host)
        connection.endheaders()
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer, text

    return run


def test_it_listens_on_this_machine_only(viewer: Viewer) -> None:
    assert viewer._server.server_address[0] == "127.0.0.1"
    assert viewer.address == f"http://127.0.0.1:{viewer.port}/"


def test_the_list_has_every_recording_under_the_directory(ask: Ask) -> None:
    answer, text = ask("/")

    assert answer.status == 200
    assert set(re.findall(r'href="(/run/[^"]+)"', text)) == {
        "/run/baseline",
        "/run/runs/candidate",
        "/run/runs/growing",
    }
    assert text.count("recording, or cut off") == 1


def test_one_recording_is_checked_and_two_are_compared(ask: Ask) -> None:
    for path, word in (
        ("/run/baseline", "healthy"),
        ("/compare?baseline=baseline&candidate=runs/candidate", "diverged"),
    ):
        answer, text = ask(path)
        assert answer.status == 200
        assert re.search(rf'<span class="word">(<[^>]+>)?{word}<', text)
        assert '<a href="/">' in text


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "", "localhost.evil:{port}"]
)
def test_requests_for_another_host_are_refused(ask: Ask, viewer: Viewer, host: str) -> None:
    for path in ("/", "/run/baseline", "/state?of=baseline"):
        answer, text = ask(path, host=host.format(port=viewer.port))
        assert answer.status == 421
        assert "/run/" not in text
        assert "recordings under" not in text


def test_requests_for_localhost_are_answered(ask: Ask, viewer: Viewer) -> None:
    assert ask("/", host=f"LocalHost:{viewer.port}")[0].status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_sent_to_it(ask: Ask, method: str) -> None:
    assert ask("/", method=method)[0].status == 501


OUTSIDE = (
    "../secret",
    "..%2Fsecret",
    "runs/../../secret",
    "%2e%2e/secret",
    "{parent}/secret",
    "//{parent}/secret",
    "baseline%00",
)


@pytest.mark.parametrize("name", OUTSIDE)
def test_nothing_outside_the_directory_is_read(ask: Ask, root: Path, name: str) -> None:
    name = name.format(parent=root.parent)
    for path in (f"/run/{name}", f"/compare?baseline=baseline&candidate={name}"):
        assert ask(path)[0].status == 404
    assert ask(f"/state?of={name}")[1] == "gone"


def test_links_that_lead_out_of_the_directory_are_not_followed(ask: Ask, root: Path) -> None:
    (root / "linked").symlink_to(root.parent / "secret")
    shutil.copytree(root / "baseline", root / "partly")
    shutil.rmtree(root / "partly" / "rank-00000")
    (root / "partly" / "rank-00000").symlink_to(root.parent / "secret" / "rank-00000")

    for path in ("/", "/run/partly"):
        assert "is a link that leads outside of" in ask(path)[1]
    assert "linked" not in ask("/")[1]
    assert ask("/run/linked")[0].status == 404
    assert ask("/run/partly")[0].status == 422


def test_a_link_deep_in_a_recording_leads_nowhere_either(ask: Ask, root: Path) -> None:
    name = tensor_file(step=0, row=0, site="x", content=b"secret")
    change_columns(root / "baseline" / "rank-00000", tensors=[name, *[""] * (num_rows(root / "baseline") - 1)])
    (root / "baseline" / "rank-00000" / "tensors").mkdir()
    (root.parent / "secret" / Path(name).name).write_bytes(b"secret")
    (root / "baseline" / "rank-00000" / "tensors" / "step-000000").symlink_to(root.parent / "secret")

    answer, text = ask("/run/baseline")
    assert answer.status == 422
    assert "is a link that leads outside of" in text


def num_rows(recording: Path) -> int:
    return len(next(open_recording(str(recording)).steps(0)).observations)


@pytest.mark.parametrize("name", ["run.json", "rank.json", "observations.arrows", "observations.crc"])
@pytest.mark.timeout(60)
def test_a_fifo_in_place_of_a_file_hangs_no_page(ask: Ask, root: Path, name: str) -> None:
    file = next((root / "baseline").rglob(name))
    file.unlink()
    os.mkfifo(file)

    answer, text = ask("/run/baseline")
    assert answer.status == 422
    assert "it is a FIFO, not a file" in text
    assert ask("/compare?baseline=baseline&candidate=runs/candidate")[0].status == 422
    assert ask("/run/runs/candidate")[0].status == 200
    assert ask("/")[0].status == 200
    assert ask("/state?of=baseline")[0].status == 200


def test_one_odd_directory_does_not_hide_the_others(ask: Ask, root: Path) -> None:
    shutil.copytree(root / "baseline", root / "loop")
    (root / "loop" / "rank-00000" / "again").symlink_to("again")
    odd = os.fsencode(root) + b"/od\xffd"
    shutil.copytree(os.fsencode(root / "baseline"), odd)

    answer, text = ask("/")
    assert answer.status == 200
    assert "runs/candidate" in text
    assert 'href="/run/od%FFd"' in text
    assert ask("/run/od%FFd")[0].status == 200
    assert ask("/run/loop")[0].status == 200  # nothing reads the link that leads to itself
    assert ask("/state?of=loop")[1] != "gone"


FAILING = """import sys; print('{"status": 500, "message": "ValueError: <b>odd"}'); sys.exit(3)"""
DYING = "import os; os.abort()"
SLOW = "import time; time.sleep(600)"


def instead(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Have this run in the place of what writes pages."""
    monkeypatch.setattr(pages, "START", code)


@pytest.mark.parametrize(
    ("code", "message"), [(FAILING, "ValueError: &lt;b&gt;odd"), (DYING, "ended with signal SIGABRT")]
)
def test_whatever_goes_wrong_there_is_an_answer(
    ask: Ask, monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    instead(monkeypatch, code)
    answer, text = ask("/run/baseline")

    assert answer.status == 500
    assert message in text
    monkeypatch.undo()
    assert ask("/run/baseline")[0].status == 200


def test_a_page_that_takes_long_is_asked_for_again_and_keeps_nobody_waiting(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "WAIT_SECONDS", 0.5)
    monkeypatch.setattr(looks, "LOOK_SECONDS", 0.2)  # a list waits that long for what it does not know
    instead(monkeypatch, f"import time; time.sleep(4); {pages.START}")
    answer, text = ask("/run/baseline")

    assert (answer.status, answer.headers["Retry-After"]) == (503, "2")
    assert 'http-equiv="refresh" content="2"' in text
    begun = time.monotonic()
    assert ask("/")[0].status == 200
    assert ask("/state?of=baseline")[0].status == 200
    assert time.monotonic() - begun < 2
    monkeypatch.setattr(pages, "WAIT_SECONDS", 60)
    assert ask("/run/baseline")[0].status == 200  # the process that was started by the first request


def test_a_page_that_takes_too_long_is_given_up(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "LIMIT_SECONDS", 1)
    instead(monkeypatch, SLOW)
    answer, text = ask("/run/baseline")

    assert answer.status == 504
    assert "took longer than" in text


def test_a_page_that_is_too_large_to_keep_is_not_read(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MOST_BYTES", 1_000)
    answer, text = ask("/run/baseline")

    assert answer.status == 422
    assert "traindiff report writes it to a file" in text


def test_pages_that_nobody_asks_for_any_more_make_room_for_others(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    original = pages.START
    monkeypatch.setattr(pages, "WAIT_SECONDS", 0.1)
    monkeypatch.setattr(pages, "FORGOTTEN_SECONDS", 1)
    instead(monkeypatch, SLOW)
    assert ask("/run/baseline")[0].status == 503
    assert ask("/run/runs/growing")[0].status == 503
    instead(monkeypatch, original)
    monkeypatch.setattr(pages, "WAIT_SECONDS", 60)

    assert ask("/run/runs/candidate")[0].status == 200


def slow_clients(viewer: Viewer, count: int) -> list[socket.socket]:
    """Clients that send the beginning of a request."""
    clients = []
    for _ in range(count):
        clients.append(socket.create_connection((served.ADDRESS, viewer.port), timeout=20))
        clients[-1].sendall(b"GET / HTTP/1.1\r\nHost: 127")
    return clients


def test_hundreds_of_slow_clients_take_few_threads_and_keep_nobody_out(viewer: Viewer, ask: Ask) -> None:
    before = active_count()
    clients = slow_clients(viewer, 300)
    begun = time.monotonic()

    assert ask("/")[0].status == 200
    assert time.monotonic() - begun < 5
    assert active_count() - before <= served.MOST_CONNECTIONS + 2  # what looks into recordings, and its limit
    for client in clients:
        client.close()


def test_a_client_that_sends_a_byte_now_and_then_is_not_waited_for(
    viewer: Viewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "REQUEST_SECONDS", 1.0)
    (client,) = slow_clients(viewer, 1)
    begun = time.monotonic()
    with suppress(OSError):
        while time.monotonic() - begun < 10:
            client.sendall(b"x")
            time.sleep(0.1)

    assert time.monotonic() - begun < 5
    client.close()


def test_a_client_that_does_not_take_its_answer_is_not_waited_for(
    viewer: Viewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "SEND_SECONDS", 1.0)
    monkeypatch.setattr(served, "message_page", lambda *_, **__: "x" * 50_000_000)
    before = active_count()
    with socket.create_connection((served.ADDRESS, viewer.port), timeout=20) as client:
        client.sendall(f"GET /nothing HTTP/1.0\r\nHost: 127.0.0.1:{viewer.port}\r\n\r\n".encode())
        assert client.recv(8) == b"HTTP/1.0"
        until = time.monotonic() + 10
        while active_count() > before and time.monotonic() < until:
            time.sleep(0.1)
        assert active_count() == before


@pytest.mark.parametrize("size", [served.REQUEST_BYTES + 1, 10_000_000])
def test_a_request_that_is_too_large_is_not_read(viewer: Viewer, ask: Ask, size: int) -> None:
    with socket.create_connection((served.ADDRESS, viewer.port), timeout=20) as client, suppress(OSError):
        client.sendall(b"GET /" + b"a" * size)
        assert client.recv(100) == b""
    assert ask("/")[0].status == 200


def test_it_ends_at_once_while_clients_and_pages_are_waited_for(tmp_path: Path) -> None:
    record(tmp_path / "run")
    code = (
        "import threading, time; from pathlib import Path; from traindiff.present.viewer import Viewer, pages\n"
        f"pages.START = {SLOW!r}\n"
        "from traindiff.cli.app import app; import traindiff.cli.commands\n"
        f"app(['view', {str(tmp_path)!r}, '--port', '0'])\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = re.search(r":(\d+)/", process.stderr.readline())
        assert found is not None
        clients = [socket.create_connection((served.ADDRESS, int(found[1])), timeout=20) for _ in range(50)]
        clients[-1].sendall(f"GET /run/run HTTP/1.0\r\nHost: 127.0.0.1:{found[1]}\r\n\r\n".encode())
        time.sleep(1)
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.wait(timeout=20)

        assert time.monotonic() - begun < 3
        assert "Traceback" not in process.stderr.read()
        for client in clients:
            client.close()


def test_what_is_not_there_is_said(ask: Ask) -> None:
    assert ask("/run/nothing")[0].status == 404
    assert ask("/favicon.ico")[0].status == 404
    assert ask("/compare?baseline=baseline")[0].status == 404


def test_a_damaged_recording_is_said_to_be_one(ask: Ask, root: Path) -> None:
    (root / "baseline" / "run.json").write_text("{")
    answer, text = ask("/run/baseline")

    assert answer.status == 422
    assert "run.json" in text
    assert ask("/")[0].status == 200


def test_only_the_report_of_a_run_that_is_recording_asks_for_news(ask: Ask) -> None:
    assert 'data-refresh=""' in ask("/run/baseline")[1]
    assert 'data-refresh="/state?of=runs%2Fgrowing"' in ask("/run/runs/growing")[1]


def test_the_state_of_a_recording_changes_when_it_grows(ask: Ask, root: Path) -> None:
    before = ask("/state?of=runs%2Fgrowing")[1]
    assert ask("/state?of=runs%2Fgrowing")[1] == before
    shutil.rmtree(root / "runs" / "growing")
    record(root / "runs" / "growing", steps=5, close=False)

    assert ask("/state?of=runs%2Fgrowing")[1] != before
    assert "5 steps" in re.sub(r"<[^>]+>|\s+", " ", ask("/run/runs/growing")[1]).replace("  ", " ")


def test_a_page_is_computed_once_for_each_state(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    text = ask("/run/baseline")[1]
    instead(monkeypatch, FAILING)

    assert {ask("/run/baseline")[1] for _ in range(3)} == {text}


def test_answers_forbid_to_be_framed_kept_or_read_from_elsewhere(ask: Ask) -> None:
    answer, _ = ask("/")

    assert {name: answer.headers[name] for name in served.HEADERS} == dict(served.HEADERS)
    assert ask("/", method="HEAD")[1] == ""


def test_names_of_directories_are_text(ask: Ask, root: Path) -> None:
    name = "<img src=x onerror=alert(1)>"
    hostile(root / name)
    _, text = ask("/")

    assert "<img" not in text
    assert ask(f"/run/{quote(name)}")[0].status == 200
