"""A recording that ends early says why, on a full disk too."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.storage.full_disk import FullDisk
from tests.storage.samples import RUN, read, step, write
from traindiff.errors import CorruptRecordingError
from traindiff.storage import Gap, RecordingWriter, gap, open_recording
from traindiff.storage.gap import RESERVED_BYTES


def message(run: Path) -> str:
    return open_recording(str(run)).status(0).message


@pytest.mark.parametrize("file", ["data", "seals"])
def test_a_step_that_finds_no_room_is_named_with_the_reason(file: str, tmp_path: Path) -> None:
    writer = write(tmp_path / "run", steps=2, close=False)
    setattr(writer._files, file, FullDisk(getattr(writer._files, file), 10))

    with pytest.raises(OSError, match=r"\[Errno 28\] step 2 could not be written: No space left on device"):
        writer.write_step(*step(2))
    writer.close()

    assert message(tmp_path / "run") == (
        "rank 0: step 2 could not be written: No space left on device; all steps before it are used."
    )
    assert [one.step for one in read(tmp_path / "run")] == [0, 1]


def test_the_reason_is_written_where_no_file_can_be_appended_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = write(tmp_path / "run", steps=1, close=False)

    def refuse(*_: object) -> int:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr("traindiff.storage.written_files.UnbufferedFile.write", refuse)
    with pytest.raises(OSError, match="step 1 could not be written: Disk quota exceeded"):
        writer.write_step(*step(1))
    writer.close()
    assert "step 1 could not be written: Disk quota exceeded" in message(tmp_path / "run")


def test_the_space_of_the_reason_is_taken_when_the_recording_begins(tmp_path: Path) -> None:
    writer = write(tmp_path / "run", steps=1, close=False)
    note = tmp_path / "run/rank-00000/gap.json"
    assert note.read_bytes() == b" " * RESERVED_BYTES
    assert note.stat().st_blocks * 512 >= RESERVED_BYTES
    assert message(tmp_path / "run") == (
        "rank 0: the recording was not closed (the run was killed, could not write, or still runs)."
    )

    writer.give_up(Gap(reason="the reason", step=1, optimizer="generator"))

    assert note.stat().st_size == RESERVED_BYTES
    assert "step 1 of generator could not be written: the reason" in message(tmp_path / "run")
    writer.close()


def test_a_complete_recording_has_no_file_for_it(tmp_path: Path) -> None:
    write(tmp_path / "run")
    assert sorted(file.name for file in (tmp_path / "run/rank-00000").iterdir()) == [
        "observations.arrows", "observations.crc", "rank.json",
    ]  # fmt: skip


def test_an_end_that_finds_no_room_is_said(tmp_path: Path) -> None:
    writer = write(tmp_path / "run", steps=2, close=False)
    writer._files.data = FullDisk(writer._files.data, 3)  # type: ignore[assignment]

    with pytest.raises(OSError, match="its end could not be written: No space left on device"):
        writer.close()

    assert "the recording ends early: its end could not be written: No space left on device" in message(
        tmp_path / "run"
    )
    assert len(read(tmp_path / "run")) == 2


def test_a_rank_json_that_found_no_room_is_written_with_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RecordingWriter(str(tmp_path / "run"), run=RUN)
    monkeypatch.setattr(writer._files, "put", _no_room)
    writer.write_rank({"model": "Sample"})
    writer.write_step(*step(0))
    assert not (tmp_path / "run/rank-00000/rank.json").exists()

    monkeypatch.undo()
    writer.write_step(*step(1))
    writer.close()

    assert open_recording(str(tmp_path / "run")).rank_content(0) == {"model": "Sample"}
    assert message(tmp_path / "run") == ""


def test_a_rank_json_that_never_found_room_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RecordingWriter(str(tmp_path / "run"), run=RUN)
    monkeypatch.setattr(writer._files, "put", _no_room)
    writer.write_rank({"model": "Sample"})

    with pytest.raises(OSError, match=r"rank\.json: No space left on device"):
        writer.close()

    assert "rank.json: No space left on device" in message(tmp_path / "run")


def _no_room(_path: str, _content: bytes) -> None:
    raise OSError(28, "No space left on device")


def test_every_reason_fits_into_its_space(tmp_path: Path) -> None:
    for text in ("x" * 10_000, "\U0001f600" * 5000, "\x1b\n\ud800\u202e" * 3000, '"\\' * 9000):
        writer = write(tmp_path / "run", overwrite=True, close=False)
        writer.give_up(Gap(reason=text, step=2**62, optimizer=text))
        writer.close()
        assert (tmp_path / "run/rank-00000/gap.json").stat().st_size == RESERVED_BYTES
        found = message(tmp_path / "run")
        assert found.startswith(f"rank 0: step {2**62} of ")
        assert found.isprintable()


@pytest.mark.parametrize(
    "content",
    [b"{", b"[]", b'{"reason": "x"}', b'{"reason": "x", "step": 1, "optimizer": "", "checksum": "crc32:0"}'],
)
def test_a_damaged_file_of_a_gap_is_refused(content: bytes, tmp_path: Path) -> None:
    write(tmp_path / "run")
    (tmp_path / "run/rank-00000/gap.json").write_bytes(content)
    with pytest.raises(CorruptRecordingError, match=r"gap\.json is damaged"):
        message(tmp_path / "run")


@pytest.mark.parametrize("change", [{"step": "1"}, {"step": True}, {"reason": 3}, {"optimizer": None}])
def test_a_gap_of_other_types_is_refused_although_its_checksum_is_right(
    change: dict[str, object], tmp_path: Path
) -> None:
    write(tmp_path / "run")
    content = {"reason": "x", "step": 1, "optimizer": "", **change}
    (tmp_path / "run/rank-00000/gap.json").write_bytes(gap.manifest.dump(content))
    with pytest.raises(CorruptRecordingError, match=r"gap\.json is damaged"):
        message(tmp_path / "run")


def test_a_run_killed_before_the_space_was_taken_has_no_gap(tmp_path: Path) -> None:
    write(tmp_path / "run")
    (tmp_path / "run/rank-00000/gap.json").touch()
    assert message(tmp_path / "run") == ""
