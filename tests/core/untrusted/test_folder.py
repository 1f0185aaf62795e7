"""Nothing outside of a directory is read, and reading never waits."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import fsspec
import pytest

from traindiff.core.untrusted.folder import Folder
from traindiff.errors import CorruptRecordingError

pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    directory = tmp_path / "inside"
    (directory / "below").mkdir(parents=True)
    (directory / "below/file").write_bytes(b"content")
    (tmp_path / "secret").write_bytes(b"secret")
    return directory


def test_a_file_is_read(inside: Path) -> None:
    folder = Folder.of(inside)

    assert folder.read("below/file", limit=7) == b"content"
    assert folder.size("below/file") == 7
    assert folder.names() == ["below"]
    assert folder.within("below").read("file", limit=7) == b"content"


@pytest.mark.parametrize(
    "name",
    ["../secret", "below/../../secret", "/etc/passwd", "below/..", "", ".", "below//file", "a\0b", "\\secret", "C:\\x"],
)
def test_a_name_that_leads_outside_or_is_none_is_refused(inside: Path, name: str) -> None:
    with pytest.raises(CorruptRecordingError, match="it names the file"):
        Folder.of(inside).read(name, limit=100)
    with pytest.raises(CorruptRecordingError, match="it names the file"):
        Folder(fsspec.filesystem("memory"), "/inside").read(name, limit=100)


def test_a_name_that_no_file_system_has_is_refused(inside: Path) -> None:
    for name in ("\ud800", "x" * 300, "below/file/deeper", "missing"):
        with pytest.raises(CorruptRecordingError):
            Folder.of(inside).read(name, limit=100)


def test_links_are_followed_inside_and_refused_outside(inside: Path) -> None:
    (inside / "good").symlink_to("below/file")
    (inside / "bad").symlink_to("../secret")
    (inside / "out").symlink_to("..")
    (inside / "loop").symlink_to("loop")
    folder = Folder.of(inside)

    assert folder.read("good", limit=100) == b"content"
    for name in ("bad", "out/secret"):
        with pytest.raises(CorruptRecordingError, match="link that leads outside"):
            folder.read(name, limit=100)
    with pytest.raises(CorruptRecordingError, match="loop"):
        folder.read("loop", limit=100)
    with pytest.raises(CorruptRecordingError, match="link that leads outside"):
        folder.within("out")


def test_a_link_to_the_directory_itself_is_fine(inside: Path) -> None:
    (inside.parent / "link").symlink_to(inside)

    assert Folder.of(inside.parent / "link").read("below/file", limit=100) == b"content"


def test_what_is_no_regular_file_is_refused_without_waiting(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(inside / "fifo")
    monkeypatch.chdir(inside)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind("socket")
    folder = Folder.of(inside)

    for name, kind in (("fifo", "a FIFO"), ("socket", "a socket"), ("below", "a directory")):
        assert folder.exists(name)
        with pytest.raises(CorruptRecordingError, match=f"{kind}, not a file"):
            folder.open(name)
        with pytest.raises(CorruptRecordingError, match=kind):
            folder.size(name)


def test_a_file_that_becomes_a_fifo_while_it_is_opened_is_refused(
    inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = (inside / "below/file").stat()
    os.mkfifo(inside / "fifo")
    monkeypatch.setattr(Folder, "_status", lambda *_: status)  # the look before the opening sees a file

    with pytest.raises(CorruptRecordingError, match="not a regular file"):
        Folder.of(inside).open("fifo")


def test_a_file_that_is_too_large_is_refused_before_it_is_read(inside: Path) -> None:
    with (inside / "huge").open("wb") as file:
        file.truncate(1 << 40)

    with pytest.raises(CorruptRecordingError, match=r"it has 1099511627776 bytes, and may have 100\."):
        Folder.of(inside).read("huge", limit=100)


def test_files_elsewhere_are_checked_likewise() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/untrusted/here/file", b"content")
    folder = Folder(memory, "/untrusted/here")

    assert folder.read("file", limit=7) == b"content"
    assert folder.size("file") == 7
    assert folder.names() == ["file"]
    with pytest.raises(CorruptRecordingError, match="it has 7 bytes, and may have 3"):
        folder.read("file", limit=3)
    with pytest.raises(CorruptRecordingError, match="missing"):
        folder.read("other", limit=3)


def test_a_file_that_is_written_again_has_another_state(inside: Path) -> None:
    store = fsspec.filesystem("memory")
    store.put(str(inside), "/states", recursive=True)
    try:
        for folder in (Folder.of(inside), Folder(store, "/states")):
            before = folder.state("below/file")
            assert before != ""
            assert folder.state("below/file") == before
            assert folder.state("below/none") == ""
            if folder.file_system is store:
                store.pipe_file("/states/below/file", b"written")
            else:
                (inside / "other").write_bytes(b"written")
                (inside / "other").replace(inside / "below/file")
            assert folder.state("below/file") != before
    finally:
        store.rm("/states", recursive=True)
    with pytest.raises(CorruptRecordingError):
        Folder.of(inside).state("../secret")
