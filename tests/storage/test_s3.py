"""Recordings on a server for S3, from the training to the report, with the faults that such a server has."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from tests.storage.s3_server import S3Server, answering, cut, s3_server
from tests.storage.samples import RUN, step, write
from traindiff.cli.commands import app
from traindiff.errors import ConfigError, NotARecordingError
from traindiff.present.viewer.listing import Listing
from traindiff.present.viewer.pages import catalog_of, written
from traindiff.storage import RecordingWriter, open_recording
from traindiff.storage.following import Follower, open_followed
from traindiff.storage.stores import StoreError
from traindiff.storage.uploads import Uploads

URL = "s3://recordings/runs/base"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with s3_server(monkeypatch) as made:
        yield made


def steps(url: str = URL) -> list[int]:
    return [one.step for one in open_recording(url).steps(0)]


def run_command(*words: str) -> tuple[int, str]:
    ended = CliRunner().invoke(app, words)
    return ended.exit_code, ended.output


@pytest.mark.usefixtures("server")
def test_what_is_written_is_read() -> None:
    write(URL, steps=3)
    assert steps() == [0, 1, 2]
    assert open_recording(URL).status(0).ending == "closed"


TRAINING = """
import os, sys, time, torch, traindiff

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = traindiff.record(sys.argv[1], model, optimizer)
for number in range(5):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print("trained", flush=True)
if sys.argv[2] == "killed":
    time.sleep(60)
elif sys.argv[2] == "error":
    raise ValueError("enough")
"""


@pytest.mark.usefixtures("server")
def test_a_training_that_is_killed_keeps_its_steps() -> None:
    with subprocess.Popen([sys.executable, "-c", TRAINING, URL, "killed"], stdout=subprocess.PIPE) as training:
        assert training.stdout is not None
        assert training.stdout.readline() == b"trained\n"
        until = time.monotonic() + 60
        while not fsspec.filesystem("s3").exists(URL) or steps() != [0, 1, 2, 3, 4]:
            assert time.monotonic() < until
        training.send_signal(signal.SIGKILL)
    assert steps() == [0, 1, 2, 3, 4]
    assert open_recording(URL).status(0).ending == "unclosed"


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(("how", "ending"), [("exit", "closed"), ("error", "aborted")])
def test_a_training_that_ends_without_closing_uploads_everything(how: str, ending: str, server: S3Server) -> None:
    named = os.environ | {"AWS_ENDPOINT_URL": server.endpoint.replace("127.0.0.1", "localhost")}
    ended = subprocess.run([sys.executable, "-c", TRAINING, URL, how], env=named, capture_output=True, check=False)
    assert (b"traindiff" in ended.stderr.splitlines()[-1] if ended.stderr else False) is False
    assert steps() == [0, 1, 2, 3, 4]
    assert open_recording(URL).status(0).ending == ending


EXITING = """
import sys, threading, time
from tests.storage.samples import RUN, step
from traindiff.observe.common.circumstances import close_at_exit
from traindiff.storage import RecordingWriter

writer = RecordingWriter(sys.argv[1], run=RUN)
writer.write_step(*step(0))
writer._files.uploads.flush()
close_at_exit(writer)

def go_on():
    threading.main_thread().join()
    writer.write_step(*step(1))

threading.Thread(target=go_on).start()
"""


@pytest.mark.parametrize("caches", [True, False])
def test_while_python_exits_new_connections_are_opened_by_name(caches: bool, server: S3Server) -> None:
    address = {
        "AWS_ENDPOINT_URL": server.endpoint.replace("127.0.0.1", "localhost"),
        "FSSPEC_S3": json.dumps({"config_kwargs": {"connector_args": {"use_dns_cache": caches}}}),
    }
    ended = subprocess.run(
        [sys.executable, "-c", EXITING, URL], env=os.environ | address, capture_output=True, check=False, timeout=240
    )
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert steps() == [0, 1]
    assert open_recording(URL).status(0).ending == "closed"


@pytest.mark.parametrize(
    "fault", [answering("503 Slow Down", "SlowDown"), answering("500 Error", "InternalError"), cut]
)
def test_a_few_failures_change_nothing(fault: object, server: S3Server) -> None:
    writer = RecordingWriter(URL, run=RUN)
    server.faults = [fault] * 3  # type: ignore[list-item]
    writer.write_step(*step(0))
    writer._files.uploads.flush()
    server.faults = [fault] * 2  # type: ignore[list-item]
    writer.close()
    server.faults = [fault] * 2  # type: ignore[list-item]
    assert steps() == [0]


def test_the_training_does_not_wait_for_a_slow_store(server: S3Server) -> None:
    writer = RecordingWriter(URL, run=RUN)
    answers = threading.Event()

    def held(_: object) -> None:
        answers.wait(60.0)

    server.always = held
    before = len(server.requests)
    for number in range(20):
        writer.write_step(*step(number))
    assert len(server.requests) - before <= 1, "no step has waited for its upload"
    answers.set()
    writer.close()
    server.always = None
    assert steps() == list(range(20))


def test_credentials_that_expire_end_the_recording_and_not_the_training(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(Uploads.__init__.__kwdefaults__, "lasting_seconds", 0.1)
    writer = RecordingWriter(URL, run=RUN)
    writer.write_step(*step(0))
    writer._files.uploads.flush()
    server.always = answering("400 Bad Request", "ExpiredToken")
    writer.write_step(*step(1))
    with pytest.raises(OSError, match=r"step 1 could not be written: the credentials are not accepted \(ExpiredToken"):
        writer.close()

    server.always = None
    assert steps() == [0]
    assert open_recording(URL).status(0).ending == "unclosed"


def test_a_store_without_room_is_named_in_the_recording(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lasting_seconds", "retry_seconds"):
        monkeypatch.setitem(Uploads.__init__.__kwdefaults__, name, 0.1)
    writer = RecordingWriter(URL, run=RUN)
    full = answering("403 Forbidden", "QuotaExceeded")
    server.always = lambda request: full(request) if request["PATH_INFO"].endswith(".segment") else None
    writer.write_step(*step(0))
    with pytest.raises(OSError, match="step 0 could not be written"):
        writer.close()
    server.always = None
    assert "rank 0: step 0 could not be written: " in open_recording(URL).status(0).message


EMPTY = b"<ListBucketResult><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>"


def test_what_a_store_does_not_list_yet_is_not_called_lost(server: S3Server) -> None:
    writer = write(URL, steps=3, close=False)
    server.always = lambda request: ("200 OK", EMPTY) if "list-type" in request["QUERY_STRING"] else None
    writer.close()
    assert any(method == "HEAD" and path.endswith(".segment") for method, path, _ in server.requests)
    server.always = None
    assert (steps(), open_recording(URL).status(0).ending) == ([0, 1, 2], "closed")


BEGINNING = """
import sys
from tests.storage.samples import write

write(sys.argv[1], steps=2, overwrite=True)
"""


@pytest.mark.usefixtures("server")
def test_a_run_that_another_process_begins_is_followed() -> None:
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 1:
            fsspec.filesystem("s3", skip_instance_cache=True).pipe(f"{URL}/rank-00000/rank.json", b"{}")
        elif len(waits) == 2:
            subprocess.run([sys.executable, "-c", BEGINNING, URL], check=True)

    recording = open_followed(URL, Follower(20, sleep=sleep, clock=lambda: float(len(waits))))
    assert [one.step for one in recording.steps(0)] == [0, 1]


def test_a_missing_bucket_is_named_and_not_made(server: S3Server) -> None:
    with pytest.raises(NotARecordingError, match="there is no bucket 'recording'"):
        open_recording("s3://recording/runs/base")
    with pytest.raises(ConfigError, match="there is no bucket 'recording'"):
        RecordingWriter("s3://recording/runs/base", run=RUN)
    assert ("PUT", "/recording", "") not in server.requests


@pytest.mark.usefixtures("server")
def test_missing_credentials_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    fsspec.filesystem("s3").clear_instance_cache()
    with pytest.raises(StoreError, match=r"no credentials .* Set AWS_ACCESS_KEY_ID"):
        open_recording(URL)
    with pytest.raises(ConfigError, match="there are no credentials"):
        RecordingWriter(URL, run=RUN)


@pytest.mark.usefixtures("server")
def test_a_wrong_endpoint_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr("s3fs.core.S3FileSystem.retries", 1)
    fsspec.filesystem("s3").clear_instance_cache()
    with pytest.raises(StoreError, match=r"does not answer .*127\.0\.0\.1:9.* AWS_ENDPOINT_URL"):
        open_recording(URL)


def test_late_steps_are_read_without_the_ones_before_them(server: S3Server) -> None:
    writer = RecordingWriter(URL, run=RUN)
    writer.write_rank({"optimizers": [{"name": "optimizer", "type": "SGD", "groups": []}], "ended": None})
    for number in range(400):
        writer.write_step(*step(number, sites=30))
    writer.close()
    recording = open_recording(URL)
    size = recording._stream(0)._size()
    server.requests.clear()
    stream = recording._stream(0)
    with stream._folder.open("observations.arrows") as file:
        file.seek(size // 2)
        assert len(file.read(1000)) == 1000

    ranges = [one[2].removeprefix("bytes=").split("-") for one in server.requests if one[2]]
    fetched = sum(int(last) - int(first) + 1 for first, last in ranges)
    assert 1000 <= fetched <= 100_000 < size


@pytest.mark.usefixtures("server")
def test_every_command_takes_urls(tmp_path: Path) -> None:
    write(URL, steps=2)
    write("s3://recordings/runs/candidate", steps=2)
    (weights := tmp_path / "model.safetensors").touch()
    save_file({"weight": np.ones(3, dtype=np.float32)}, weights)
    fsspec.filesystem("s3").put_file(str(weights), "recordings/model.safetensors")

    code, printed = run_command("show", URL, "--json")
    assert code == 0, printed
    assert json.loads(printed)["steps"] == [0, 1]
    assert run_command("compare", URL, "s3://recordings/runs/candidate", "--json")[0] in (0, 3)
    assert run_command("check", URL)[0] in (0, 1, 3)
    assert run_command("report", URL, "-o", str(tmp_path / "report.html"))[0] == 0
    assert run_command("export", "tensorboard", URL, str(tmp_path / "exported"))[0] in (0, 2)
    code, printed = run_command("weights", "s3://recordings/model.safetensors", str(weights))
    assert (code, "identical" in printed) == (0, True)
    for command in ("show", "check", "view", "weights"):
        words = [command, "s3://recording/base", *(["s3://recording/base"] if command == "weights" else [])]
        code, printed = run_command(*words)
        assert (code, "there is no bucket 'recording'" in printed) == (2, True)


@pytest.mark.usefixtures("server")
def test_a_list_of_a_store_goes_on_behind_the_recordings_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("traindiff.present.viewer.stored_catalog.MOST", 2)
    for name in ("a", "b", "c/d"):
        write(f"s3://recordings/runs/{name}", steps=1)
    for url, before in (("s3://recordings/runs", ""), ("s3://", "s3://recordings/runs/")):
        first = json.loads(run_command("ls", url, "--json")[1])
        rest = json.loads(run_command("ls", url, "--json", "--after", "2")[1])
        assert sorted(one["path"].removeprefix(before or f"{url}/") for one in first["recordings"]) == ["a", "b"]
        assert [one["path"].removeprefix(before or f"{url}/") for one in rest["recordings"]] == ["c/d"]
        assert (first["has_more"], rest["has_more"]) == (True, False)


@pytest.mark.usefixtures("server")
def test_view_lists_and_shows_what_is_under_a_url() -> None:
    write(URL, steps=2)
    write("s3://recordings/runs/deep/candidate", steps=2)
    catalog = catalog_of("s3://recordings/runs")
    assert {one.name: one.ending for one in catalog.recordings()} == {"deep/candidate": "closed", "base": "closed"}
    assert catalog.find("base") == URL
    assert catalog.find("../runs/base") is None
    before = catalog.state("base")
    write(URL, steps=3, overwrite=True)
    assert catalog.state("base") != before
    assert catalog.state("nothing") == "gone"
    assert "deep/candidate" in Listing(catalog).write()
    assert "<html" in written(catalog, ["base"])
