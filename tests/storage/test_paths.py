"""Any path is either recorded to, or refused with a clear error before anything is made."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch

import traindiff
from tests.storage.samples import read, write
from traindiff.errors import ConfigError


def record(path: Any) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(path, model, optimizer):
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("below", "message"),
    [
        ("/".join("a" * 2100), "File name too long"),
        ("/".join(["runs"] * 2100), "File name too long"),
        ("x" * 256, "File name too long"),
        (f"new/deep/{'x' * 256}/run", "File name too long"),
        ("ä" * 128, "File name too long"),
        ("file/run", "Not a directory"),
        ("file/deep/er/run", "Not a directory"),
        ("loop/run", "Too many levels of symbolic links"),
        ("dangling", "File exists"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_path_that_cannot_be_made_is_refused_and_leaves_nothing(below: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    before = sorted(tmp_path.rglob("*"))

    with pytest.raises(ConfigError, match=rf"cannot be written: {message}") as caught:
        record(f"{tmp_path}/{below}")

    assert len(str(caught.value)) < 1000
    assert sorted(tmp_path.rglob("*")) == before


def test_a_deep_path_that_the_system_takes_is_recorded_to(tmp_path: Path) -> None:
    room = os.pathconf("/", "PC_PATH_MAX") - len(str(tmp_path)) - 100
    path = f"{tmp_path}/{'/'.join('a' * (room // 2))}"
    record(path)

    assert len(read(path)) == 1
    os.system(f"rm -rf {tmp_path}/a")


@pytest.mark.parametrize("path", ["", b"run", 3, None, "a\0b", PurePosixPath("a\0b"), ["run"], 1.5])
def test_what_is_no_path_is_refused(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is not a path"):
        record(path)
    assert list(tmp_path.iterdir()) == []


def test_a_place_without_the_right_to_write_is_refused(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        with pytest.raises(ConfigError, match="cannot be written: "):
            record("/proc/traindiff/run")
        return
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="cannot be written: Permission denied"):
        record(tmp_path / "run")
    tmp_path.chmod(0o700)


class Place:
    """What `os.fspath` takes."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return self.path


def test_path_like_objects_links_and_the_home_directory_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for path, where in [
        (Place("like"), "like"), (tmp_path / "path", "path"), ("~/home", "home"), ("link/run", "real/run"),
        ("./here/", "here"), ("up/../beside", "beside"), (f"file://{tmp_path}/url", "url"), ("a b/ü", "a b/ü"),
    ]:  # fmt: skip
        if where == "beside":
            (tmp_path / "up").mkdir()
        record(path)
        assert len(read(tmp_path / where)) == 1


def test_a_relative_path_is_refused_where_the_working_directory_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    (tmp_path / "work").rmdir()
    with pytest.raises(ConfigError, match="cannot be reached: No such file or directory"):
        write("run")
