"""Damaged bytes are never read as numbers: every single bit flip is noticed and located."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest

from tests.storage.samples import content, write
from traindiff.errors import CorruptRecordingError, LostFilesError, RecordingError
from traindiff.storage import open_recording
from traindiff.storage.writer import seal


@pytest.fixture(params=[True, False], ids=["closed", "unclosed"])
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    writer = write(tmp_path / "run", steps=3, close=request.param)
    yield tmp_path / "run"
    with suppress(LostFilesError):  # of tests that remove files
        writer.close()


def flips(file: Path, *, most: int) -> Iterator[tuple[int, int]]:
    """Flip one bit of the file at a time, at random places and at its very ends; gives byte and bit."""
    whole = file.read_bytes()
    places = [(byte, bit) for byte in range(len(whole)) for bit in range(8)]
    if len(places) > most:
        edges = [*places[:64], *places[-64:]]
        places = [*edges, *random.Random(0).sample(places, most - len(edges))]
    for byte, bit in places:
        damaged = bytearray(whole)
        damaged[byte] ^= 1 << bit
        file.write_bytes(damaged)
        yield byte, bit
    file.write_bytes(whole)


def test_every_bit_flip_in_the_stream_is_refused_with_its_place(run: Path) -> None:
    stream = run / "rank-00000/observations.arrows"
    for byte, _ in flips(stream, most=400):
        with pytest.raises(CorruptRecordingError) as caught:
            content(run)
        place = re.search(r"message \d+ \(bytes (\d+) to (\d+)\)", str(caught.value))
        assert str(stream) in str(caught.value)
        assert place
        assert int(place[1]) <= byte < int(place[2])


def test_every_bit_flip_in_the_seals_is_refused_with_its_place(run: Path) -> None:
    seals = run / "rank-00000/observations.crc"
    whole = seals.read_bytes()
    for byte, _ in flips(seals, most=10_000):
        line = whole[:byte].count(b"\n")
        with pytest.raises(CorruptRecordingError) as caught:
            content(run)
        message = str(caught.value)
        by_line = re.search(r"observations\.crc is damaged: line (\d+)", message)
        by_message = re.search(r"observations\.arrows is damaged: message (\d+) ", message)
        # A length that is wrong shows in the next line, whose offset no longer follows.
        found = int(by_line[1]) - 1 if by_line else int(by_message[1]) if by_message else -1
        assert found in (line, line + 1), message


@pytest.mark.parametrize("name", ["run.json", "rank-00000/rank.json"])
def test_every_bit_flip_in_a_json_file_is_refused_with_its_name(run: Path, name: str) -> None:
    for _ in flips(run / name, most=1000):
        with pytest.raises(RecordingError) as caught:
            open_recording(str(run)).rank_content(0)
        assert str(run / name) in str(caught.value)


def test_the_message_of_a_damaged_stream_says_what_to_do(run: Path) -> None:
    stream = run / "rank-00000/observations.arrows"
    data = bytearray(stream.read_bytes())
    data[100] ^= 1
    stream.write_bytes(data)
    _, length, sealed = (run / "rank-00000/observations.crc").read_text().splitlines()[0].split()

    with pytest.raises(CorruptRecordingError) as caught:
        content(run)

    assert re.fullmatch(
        rf"{re.escape(str(stream))} is damaged: message 0 \(bytes 0 to {length}\) has checksum [0-9a-f]{{8}}, "
        rf"sealed as {sealed} over {length} bytes in observations\.crc\. "
        r"Restore both files from where they were copied, or record again\.",
        str(caught.value),
    )


def test_a_missing_stream_with_seals_is_damage(run: Path) -> None:
    (run / "rank-00000/observations.arrows").unlink()

    with pytest.raises(CorruptRecordingError, match=r"observations\.arrows is missing"):
        content(run)


def test_a_stream_with_other_columns_is_refused(run: Path) -> None:
    header = pa.schema([pa.field("x", pa.int64())]).serialize().to_pybytes()
    (run / "rank-00000/observations.arrows").write_bytes(header)
    (run / "rank-00000/observations.crc").write_bytes(seal(0, header))

    with pytest.raises(CorruptRecordingError, match="does not have the columns of format version 1"):
        content(run)
