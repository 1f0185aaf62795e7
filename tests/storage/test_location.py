"""Paths and URLs that cannot be reached are errors that say what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from tests.storage.samples import write
from traindiff.core.untrusted.local_files import LocalFiles, local_path
from traindiff.errors import ConfigError
from traindiff.storage import location, open_recording, stores


def test_a_protocol_that_is_not_known_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'nowhere://run'\n    cannot be reached: Protocol not known: nowhere\."):
        open_recording("nowhere://run")


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_path: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(stores, "opened", missing)
    with pytest.raises(ConfigError, match="Install s3fs to access S3"):
        open_recording("s3://bucket/run")


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_attached(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")

    with pytest.raises(ConfigError, match=r"cannot be written: .*Not a directory") as caught:
        write(tmp_path / "file" / "run")

    assert "where you may write" in str(caught.value)
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.skipif(os.sep != "/", reason="fsspec takes paths of Windows apart")
@pytest.mark.parametrize(
    "path", ["/", "/a//b/", "a", "./a/../b", ".", "", "..", "~/a", "~nobody-of-this-name/a", "a:b", "x\0y", "/a b/ü"]
)
def test_a_local_path_is_what_fsspec_makes_of_it(path: str) -> None:
    assert local_path(path) == fsspec.core.url_to_fs(path)[1]


@pytest.mark.parametrize("path", ["file:///tmp/run", "local:///tmp/run", "file:/tmp/run"])
def test_urls_of_this_machine_are_local(path: str) -> None:
    files, root = location.file_system(path)

    assert (type(files), root) == (LocalFiles, "/tmp/run")


def test_local_files_are_those_of_fsspec(tmp_path: Path) -> None:
    (tmp_path / "directory/below").mkdir(parents=True)
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("directory")
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    own, other = LocalFiles(), fsspec.filesystem("file")
    names = ["", "directory", "file", "link", "dangling", "loop", "missing", "file/below", "x" * 300, "a\0b"]

    for name in (f"{tmp_path}/{name}".rstrip("/") for name in names):
        assert (own.exists(name), own.isdir(name)) == (other.exists(name), other.isdir(name))
    for name in ("", "/directory", "/link", "/file"):
        assert sorted(own.ls(f"{tmp_path}{name}")) == sorted(other.ls(f"{tmp_path}{name}", detail=False))
    assert own.cat_file(f"{tmp_path}/file") == b"content"
    own.rm(f"{tmp_path}/link", recursive=True)
    assert (tmp_path / "directory/below").is_dir()
    with pytest.raises(OSError, match="directory"):
        own.rm(f"{tmp_path}/directory")
    own.rm(f"{tmp_path}/directory", recursive=True)
    own.rm(f"{tmp_path}/file")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["dangling", "loop"]
    with pytest.raises(FileNotFoundError):
        own.rm(f"{tmp_path}/file")


def test_comparing_local_recordings_loads_neither_fsspec_nor_a_web_client(tmp_path: Path) -> None:
    write(tmp_path / "run")
    code = (
        "import sys; from traindiff.cli.app import app; import traindiff.cli\n"
        "try: traindiff.cli.main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "print([one for one in ('fsspec', 'asyncio', 'numpy.ma', 'http.client') if one in sys.modules])"
    )
    command = [sys.executable, "-c", code, "compare", str(tmp_path / "run"), str(tmp_path / "run")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)

    assert done.stdout.splitlines()[-1] == "[]"
