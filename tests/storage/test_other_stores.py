"""Recordings in Google's and Azure's object stores, each by an emulator on this machine: `make test-stores`."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest

from tests.storage.samples import step, write
from traindiff.analyse.check import check
from traindiff.analyse.compact.compacting import compact
from traindiff.errors import NotARecordingError
from traindiff.storage import RecordingWriter, open_recording
from traindiff.storage.stores import Store, StoreError

pytestmark = pytest.mark.filterwarnings("ignore")

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Of every Azurite."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An emulator of Google Cloud Storage; its bucket."""
    pytest.importorskip("gcsfs", reason="needs gcsfs (make test-stores)")
    emulator = pytest.importorskip(
        "gcp_storage_emulator.server", reason="needs gcp-storage-emulator (make test-stores)"
    )
    port = free_port()
    server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket="recordings")
    server.start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    try:
        yield "gs://recordings"
    finally:
        server.stop()


@contextmanager
def azure(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An emulator of Azure Blob Storage; its container."""
    pytest.importorskip("adlfs", reason="needs adlfs (make test-stores)")
    azurite = shutil.which("azurite-blob")
    if azurite is None:
        pytest.skip("needs azurite-blob on the PATH (make test-stores)")
    port = free_port()
    words = [azurite, "--silent", "--inMemoryPersistence", "--skipApiVersionCheck", "--blobPort", str(port)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        _wait_for(port)
        endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
        monkeypatch.setenv(
            "AZURE_STORAGE_CONNECTION_STRING",
            f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={endpoint};",
        )
        fsspec.filesystem("az").mkdir("recordings")
        yield "az://recordings"
    finally:
        process.kill()  # asked to end, it would wait for connections that are kept
        process.wait()


def _wait_for(port: int) -> None:
    for _ in range(300):
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError("the emulator does not answer")


@pytest.fixture(params=[google, azure], ids=["gs", "az"])
def container(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for protocol in ("gs", "az"):
        _forget(protocol)
    with request.param(monkeypatch) as made:
        yield made


def _forget(protocol: str) -> None:
    """Let the next file system read its settings anew."""
    try:
        fsspec.get_filesystem_class(protocol).clear_instance_cache()
    except ImportError:  # its package is not installed
        return


def test_what_is_written_is_read_by_ranges(container: str, tmp_path: Path) -> None:
    url = f"{container}/runs/base"
    write(url, steps=30)
    write(tmp_path / "run", steps=30)

    run = open_recording(url)
    assert [one.step for one in run.steps(0)] == list(range(30))
    assert [one.step for one in run.steps(0, begin=12, end=14)] == [12, 13, 14]
    assert run.status(0).ending == "closed"
    assert check(url).verdict == check(tmp_path / "run").verdict
    assert compact(url, tmp_path / "small").steps == 30


def test_a_recording_is_replaced_and_another_one_lies_beside_it(container: str) -> None:
    write(f"{container}/runs/base", steps=3)
    write(f"{container}/runs/other", steps=2)
    writer = RecordingWriter(f"{container}/runs/base", run={"world_size": 1, "settings": {}}, overwrite=True)
    writer.write_step(*step(7))
    writer.close()

    assert [one.step for one in open_recording(f"{container}/runs/base").steps(0)] == [7]
    assert [one.step for one in open_recording(f"{container}/runs/other").steps(0)] == [0, 1]


def test_what_is_not_there_is_told(container: str) -> None:
    protocol = container.partition("://")[0]
    name = "container" if protocol == "az" else "bucket"
    with pytest.raises(NotARecordingError, match=f"there is no {name} 'missing'. Make it first"):
        open_recording(f"{protocol}://missing/runs/base")
    with pytest.raises(NotARecordingError, match="does not exist"):
        open_recording(f"{container}/runs/missing")
    with pytest.raises(StoreError, match=f"there is no {name} 'missing'"):
        Store(fsspec.filesystem(protocol), protocol).put_files({"missing/runs/run.json": b"{}"})
