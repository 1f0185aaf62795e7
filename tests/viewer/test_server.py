"""Reports of the recordings under a directory, over HTTP on this machine."""

from __future__ import annotations

import http.client
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from urllib.parse import quote

import pytest

from tests.made_up import FC, record, scaled
from tests.recording.hostile import change_columns
from tests.report.hostile import hostile
from traindiff.recording import open_recording
from traindiff.recording.tensor_files import tensor_file
from traindiff.viewer import Viewer
from traindiff.viewer import server as served


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
        assert f'<span class="word">{word}</span>' in text
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


def test_whatever_goes_wrong_there_is_an_answer(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ValueError("<b>odd</b>")

    monkeypatch.setattr(served, "check", fails)
    answer, text = ask("/run/baseline")

    assert answer.status == 500
    assert "ValueError: &lt;b&gt;odd" in text


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
    times = []
    check = served.check
    monkeypatch.setattr(served, "check", lambda *args, **options: (times.append(args), check(*args, **options))[1])
    texts = {ask("/run/baseline")[1] for _ in range(3)}

    assert (len(times), len(texts)) == (1, 1)


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
