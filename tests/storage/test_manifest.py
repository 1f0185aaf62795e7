"""`run.json` and `rank.json`: checksums, versions, and what is no recording at all."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.storage.samples import write
from traindiff.errors import (
    CorruptRecordingError,
    FormatVersionError,
    NotARecordingError,
    RecordingError,
    TraindiffError,
)
from traindiff.storage import manifest, open_recording

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text().filter(lambda key: key != "checksum"), json_values, max_size=5))
def test_a_manifest_loads_as_it_was_dumped(content: dict[str, Any]) -> None:
    assert manifest.load(manifest.dump(content), where="run.json") == content


def test_the_checksum_is_of_the_canonical_form_so_layout_does_not_matter() -> None:
    dumped = json.loads(manifest.dump({"ä": [2.5, None], "b": 1}))

    canonical = '{"b":1,"ä":[2.5,null]}'.encode()
    assert dumped["checksum"] == f"crc32:{zlib.crc32(canonical):08x}"
    assert manifest.load(json.dumps(dumped).encode(), where="x") == {"b": 1, "ä": [2.5, None]}


def test_an_edited_file_is_refused_with_both_checksums() -> None:
    edited = manifest.dump({"every": 1}).replace(b'"every": 1', b'"every": 2')

    with pytest.raises(CorruptRecordingError) as caught:
        manifest.load(edited, where="runs/base/run.json")

    assert str(caught.value) == (
        "runs/base/run.json is damaged: its checksum is crc32:216fabbc, its content gives crc32:0a42f87f. "
        "Restore the file from where it was copied; it must not be edited."
    )


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe\x00", b'{"a": 1} x', b"[1, 2]", b"3", b'"text"'])
def test_bytes_that_are_no_json_object_are_damage(data: bytes) -> None:
    with pytest.raises(CorruptRecordingError, match=r"run\.json is damaged"):
        manifest.load_run(data, where="run.json")


def test_text_that_is_no_unicode_is_damage() -> None:
    with pytest.raises(CorruptRecordingError, match=r"rank\.json is damaged"):
        manifest.load(b'{"a": "\\ud800", "checksum": "crc32:00000000"}', where="rank.json")


@pytest.mark.parametrize("data", [b'{"format": "wandb"}', manifest.dump({"format": "wandb"})])
def test_json_of_something_else_is_not_a_recording(data: bytes) -> None:
    with pytest.raises(NotARecordingError) as caught:
        manifest.load_run(data, where="run.json")

    assert str(caught.value) == (
        'run.json is not of a recording: "format" is \'wandb\', not "traindiff-recording". '
        "Give the directory that traindiff.record(...) wrote."
    )


def test_a_newer_version_is_refused_with_both_versions_and_the_way_out(tmp_path: Path) -> None:
    write(tmp_path / "run")
    newer = manifest.dump({"format": "traindiff-recording", "version": 3, "world_size": 1})
    (tmp_path / "run/run.json").write_bytes(newer.replace(b"crc32:", b"blake3:"))  # checksums change, too

    with pytest.raises(FormatVersionError) as caught:
        open_recording(str(tmp_path / "run"))

    assert str(caught.value) == (
        f"{tmp_path}/run/run.json has format version 3; this traindiff reads versions up to 1. "
        "Update it with: pip install --upgrade traindiff"
    )


def test_older_versions_are_migrated_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "FORMAT_VERSION", 3)
    monkeypatch.setattr(
        manifest,
        "MIGRATIONS",
        {
            1: lambda old: {**old, "version": 2, "first": True},
            2: lambda old: {**old, "version": 3, "second": old["first"]},
        },
    )
    old = manifest.dump({"format": "traindiff-recording", "version": 1, "world_size": 1, "settings": {}})

    assert manifest.load_run(old, where="run.json") == {
        "format": "traindiff-recording", "version": 3, "world_size": 1, "settings": {}, "first": True, "second": True,
    }  # fmt: skip


def test_every_version_below_the_current_one_has_a_migration() -> None:
    assert set(manifest.MIGRATIONS) == set(range(1, manifest.FORMAT_VERSION))


def test_a_path_that_does_not_exist_is_not_a_recording(tmp_path: Path) -> None:
    with pytest.raises(NotARecordingError) as caught:
        open_recording(str(tmp_path / "nowhere"))

    assert str(caught.value) == (
        f"{tmp_path}/nowhere does not exist. Give the directory that traindiff.record(...) wrote."
    )


def test_a_file_is_not_a_recording(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")

    with pytest.raises(NotARecordingError) as caught:
        open_recording(str(tmp_path / "file"))

    assert str(caught.value) == (
        f"{tmp_path}/file is a file. A recording is a directory: give the one that holds run.json."
    )


def test_a_directory_without_run_json_is_not_a_recording(tmp_path: Path) -> None:
    with pytest.raises(NotARecordingError) as caught:
        open_recording(str(tmp_path))

    assert str(caught.value) == (
        f"{tmp_path} holds no run.json, so it is not a recording. Give the directory that traindiff.record(...) wrote."
    )


@pytest.mark.parametrize("kind", [NotARecordingError, CorruptRecordingError, FormatVersionError])
def test_whatever_is_wrong_with_a_recording_is_a_recording_error(kind: type[Exception]) -> None:
    assert issubclass(kind, RecordingError)
    assert issubclass(kind, TraindiffError)
