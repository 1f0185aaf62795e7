"""Which ranks a recording has, and which it should have."""

from __future__ import annotations

from pathlib import Path

from tests.recording.samples import RUN, step, write
from traindiff.recording import RecordingWriter, open_recording


def test_ranks_are_listed_and_missing_ones_named(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    run = {**RUN, "world_size": 4}
    for rank in (2, 0):  # in any order
        writer = RecordingWriter(path, run=run, rank=rank, world_size=4)
        writer.write_step(*step(rank))
        writer.close()

    recording = open_recording(path)

    assert recording.ranks == (0, 2)
    assert recording.missing_ranks == (1, 3)
    assert [part.rank for part in recording.steps(2)] == [2]
    assert [part.step for part in recording.steps(2)] == [2]


def test_ranks_that_were_not_asked_for_are_not_missing(tmp_path: Path) -> None:
    run = {**RUN, "world_size": 8, "settings": {"ranks": [0, 3]}}
    RecordingWriter(str(tmp_path / "run"), run=run, world_size=8).close()

    assert open_recording(str(tmp_path / "run")).missing_ranks == (3,)


def test_directories_of_ranks_beyond_the_world_are_ignored(tmp_path: Path) -> None:
    write(tmp_path / "run")
    (tmp_path / "run/rank-00007").mkdir()
    (tmp_path / "run/rank-1").mkdir()

    assert open_recording(str(tmp_path / "run")).ranks == (0,)
