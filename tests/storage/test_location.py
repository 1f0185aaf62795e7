"""Paths and URLs that cannot be reached are errors that say what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storage.samples import write
from traindiff.errors import ConfigError
from traindiff.storage import open_recording, stores


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
