"""Two recordings that are read in turns: what both hold in the same bytes is decoded once."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest

from tests.storage.samples import RUN, content, step, write
from traindiff.storage import RecordingWriter, open_recording, read_in_turns, stream


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that are decoded from now on."""
    found: list[int] = []
    plain = stream.unpacked

    def noted(packed: stream.PackedStep, *rest: object) -> stream.StepObservations:
        found.append(packed.step)
        return plain(packed, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(stream, "unpacked", noted)
    return found


def test_a_step_in_the_same_bytes_is_decoded_once(tmp_path: Path, decoded: list[int]) -> None:
    write(tmp_path / "first")
    write(tmp_path / "second")
    expected = content(tmp_path / "second")
    decoded.clear()
    both = [open_recording(str(tmp_path / name)) for name in ("first", "second")]
    read_in_turns(both)

    pairs = list(zip(both[0].steps(0), both[1].steps(0), strict=True))

    assert decoded == [0, 1, 2]
    assert all(own.summaries is other.summaries for own, other in pairs)
    assert [(one.optimizer, one.step, one.observations, one.summaries.tobytes()) for _, one in pairs] == expected


def test_one_other_bit_is_read(tmp_path: Path, decoded: list[int]) -> None:
    write(tmp_path / "first")
    writer = RecordingWriter(str(tmp_path / "second"), run=RUN)
    for number in range(3):
        seen, numbers = step(number)
        if number == 1:
            numbers = copy.deepcopy(numbers)
            numbers["fingerprint"][2] ^= np.uint64(1)
        writer.write_step(seen, numbers)
    writer.close()
    expected = content(tmp_path / "second")
    decoded.clear()
    both = [open_recording(str(tmp_path / name)) for name in ("first", "second")]
    read_in_turns(both)

    pairs = list(zip(both[0].steps(0), both[1].steps(0), strict=True))

    assert decoded == [0, 1, 1, 2]
    assert [(one.optimizer, one.step, one.observations, one.summaries.tobytes()) for _, one in pairs] == expected
    assert [own.summaries is other.summaries for own, other in pairs] == [True, False, True]


def test_no_step_is_kept_for_the_other_recording(tmp_path: Path, decoded: list[int]) -> None:
    """One that reads all of its steps first would otherwise hold one for each rank."""
    write(tmp_path / "first")
    write(tmp_path / "second")
    both = [open_recording(str(tmp_path / name)) for name in ("first", "second")]
    read_in_turns(both)

    for _ in both[0].steps(0):
        pass
    for _ in both[1].steps(0):
        pass

    assert decoded == [0, 1, 2, 0, 1, 2]
