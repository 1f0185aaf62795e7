"""A disk that fills up ends the recording at its last whole step; nothing is written after the gap."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storage.full_disk import FullDisk
from tests.storage.samples import RUN, content, step, write
from traindiff.storage import RecordingWriter, open_recording

STEPS = 3


@pytest.mark.parametrize("file", ["data", "seals"])
def test_whatever_fitted_on_the_disk_can_be_read(file: str, tmp_path: Path) -> None:
    write(tmp_path / "whole", steps=STEPS)
    whole = content(tmp_path / "whole")
    name = {"data": "observations.arrows", "seals": "observations.crc"}[file]
    size = (tmp_path / "whole/rank-00000" / name).stat().st_size
    rooms = {number * size // 40 for number in range(40)} if file == "data" else set(range(size))
    for room in sorted(rooms):
        writer = RecordingWriter(str(tmp_path / "run"), run=RUN, overwrite=True)
        setattr(writer._files, file, FullDisk(getattr(writer._files, file), room))
        failed = False
        for number in range(STEPS):
            try:
                writer.write_step(*step(number))
            except OSError:
                failed = True
                break
        try:
            writer.close()
        except OSError:
            failed = True

        found = content(tmp_path / "run")
        assert found == whole[: len(found)]
        assert len(found) >= STEPS - 1 or failed
        assert (open_recording(str(tmp_path / "run")).status(0).ending == "closed") == (not failed)


def test_closing_after_a_failure_closes_the_files(tmp_path: Path) -> None:
    writer = RecordingWriter(str(tmp_path / "run"), run=RUN)
    writer._files.data = FullDisk(writer._files.data, 100)  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space left"):
        writer.write_step(*step(0))

    writer.close()
    writer.close()

    assert writer._files.data.closed
    assert writer._files.seals.closed


def test_nothing_is_written_after_a_gap_even_when_there_is_room_again(tmp_path: Path) -> None:
    writer = write(tmp_path / "run", steps=1, close=False)
    writer._files.data = FullDisk(writer._files.data, 100)  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space left"):
        writer.write_step(*step(1))

    with pytest.raises(OSError, match="is incomplete: an earlier step could not be written"):
        writer.write_step(*step(2))
    writer.close()

    assert [number for _, number, _, _ in content(tmp_path / "run")] == [0]
