"""A file that was cut off, at any byte, gives a shorter recording: never an error, never a wrong row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage.samples import content, write
from traindiff.errors import CorruptRecordingError
from traindiff.storage import open_recording

STEPS = 4


def seals(rank: Path) -> list[tuple[int, int]]:
    lines = (rank / "observations.crc").read_text().splitlines()
    return [(int(line.split()[0]), int(line.split()[1])) for line in lines]


def interesting_lengths(boundaries: list[int], size: int) -> Iterator[int]:
    """Every boundary and its neighbors, and lengths in between."""
    near = {boundary + shift for boundary in [0, *boundaries, size] for shift in (-9, -8, -1, 0, 1, 7, 8, 9)}
    between = {number * size // 97 for number in range(97)}
    return iter(sorted(length for length in near | between if 0 <= length <= size))


@pytest.fixture
def rank(tmp_path: Path) -> Path:
    write(tmp_path / "run", steps=STEPS)
    return tmp_path / "run" / "rank-00000"


def test_a_stream_cut_at_any_length_reads_up_to_its_last_whole_step(rank: Path) -> None:
    data, whole = (rank / "observations.arrows").read_bytes(), content(rank.parent)
    ends = [offset + length for offset, length in seals(rank)]
    for length in interesting_lengths(ends, len(data)):
        (rank / "observations.arrows").write_bytes(data[:length])
        finished = sum(end <= length for end in ends[1:-1])

        assert content(rank.parent) == whole[:finished]
        status = open_recording(str(rank.parent)).status(0)
        assert status.ending == ("closed" if length == len(data) else "truncated")


def test_seals_cut_at_any_length_give_the_steps_of_the_whole_lines(rank: Path) -> None:
    lines, whole = (rank / "observations.crc").read_bytes(), content(rank.parent)
    ends = [position + 1 for position, byte in enumerate(lines) if byte == ord("\n")]
    for length in range(len(lines) + 1):
        (rank / "observations.crc").write_bytes(lines[:length])
        sealed = sum(end <= length for end in ends[1:-1])

        assert content(rank.parent) == whole[:sealed]
        status = open_recording(str(rank.parent)).status(0)
        if length == len(lines):
            assert status.ending == "closed"
        else:
            assert status.ending == "truncated"
            assert "observations.crc was cut off" in status.message


def test_both_files_cut_as_a_kill_cuts_them_read_up_to_the_last_whole_step(rank: Path) -> None:
    """A seal is written before its message, so a kill leaves a whole line and a part of the message."""
    data, lines = (rank / "observations.arrows").read_bytes(), (rank / "observations.crc").read_bytes()
    whole = content(rank.parent)
    for number, (offset, length) in enumerate(seals(rank)):
        kept = b"".join(line + b"\n" for line in lines.split(b"\n")[: number + 1])
        (rank / "observations.crc").write_bytes(kept)
        for part in (0, 1, length // 2, length - 1):
            (rank / "observations.arrows").write_bytes(data[: offset + part])
            assert content(rank.parent) == whole[: max(0, number - 1)]
            assert open_recording(str(rank.parent)).status(0).ending == "truncated"


def test_the_status_says_what_happened_in_a_sentence(rank: Path) -> None:
    recording = open_recording(str(rank.parent))
    stream = rank / "observations.arrows"
    offset, _ = seals(rank)[-1]

    data, lines = stream.read_bytes(), (rank / "observations.crc").read_bytes().splitlines(keepends=True)

    # As a kill leaves them.
    (rank / "observations.crc").write_bytes(b"".join(lines[:-1]))
    stream.write_bytes(data[: offset - 3])
    assert recording.status(0).message == (
        "rank 0: the last step was cut off while it was written; all steps before it are used."
    )
    (rank / "observations.crc").write_bytes(b"".join(lines[:-2]))
    stream.write_bytes(data[: seals(rank)[-1][0] + seals(rank)[-1][1]])
    assert recording.status(0).message == (
        "rank 0: the recording was not closed (the run was killed, could not write, or still runs)."
    )

    # As only somebody else leaves them.
    stream.write_bytes(data)
    assert recording.status(0).message == (
        f"rank 0: observations.crc was cut off: {len(data) - seals(rank)[-1][0] - seals(rank)[-1][1]} bytes at the end "
        "of observations.arrows have no checksum and are not used. Restore observations.crc from where it was copied."
    )
    (rank / "observations.crc").write_bytes(b"".join(lines))
    stream.write_bytes(data[: offset - 3])
    assert recording.status(0).message == (
        f"rank 0: observations.arrows was cut off: it has {offset - 3} bytes of {len(data)}, and 2 messages are "
        "missing or not whole; all steps before them are used. Restore it from where it was copied."
    )


def test_data_without_seals_are_refused_and_not_called_cut_off(rank: Path) -> None:
    (rank / "observations.crc").unlink()
    recording = open_recording(str(rank.parent))

    for read in (recording.status, lambda number: list(recording.steps(number))):
        with pytest.raises(CorruptRecordingError, match=r"observations\.crc is missing, and observations\.arrows"):
            read(0)


def test_a_rank_without_data_and_seals_says_so(rank: Path) -> None:
    for name in ("observations.crc", "observations.arrows"):
        (rank / name).unlink()

    assert open_recording(str(rank.parent)).status(0).message == (
        "rank 0: observations.crc is missing, and so is what it belongs to: no step can be read."
    )


@pytest.mark.parametrize("left", [[], ["observations.arrows"]])
def test_a_rank_killed_before_its_first_byte_has_no_steps(tmp_path: Path, left: list[str]) -> None:
    write(tmp_path / "run", steps=1)
    for file in (tmp_path / "run/rank-00000").iterdir():
        file.unlink()
    for name in left:
        (tmp_path / "run/rank-00000" / name).touch()
    recording = open_recording(str(tmp_path / "run"))

    assert list(recording.steps(0)) == []
    assert recording.rank_content(0) == {}
    assert recording.status(0).ending == "truncated"
