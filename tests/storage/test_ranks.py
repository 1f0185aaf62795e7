"""Which ranks a recording has, and which it should have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.storage.samples import RUN, step, write
from traindiff.errors import MixedRecordingError
from traindiff.storage import RecordingWriter, open_recording


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


def test_ranks_can_be_recorded_without_the_first(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    RecordingWriter(path, run={**RUN, "world_size": 4}, world_size=4).close()
    run = {**RUN, "world_size": 4, "settings": {"ranks": [1, 3]}}
    for rank in (1, 3):
        RecordingWriter(path, run=run, rank=rank, world_size=4, overwrite=True).close()

    recording = open_recording(path)
    assert recording.run["settings"] == {"ranks": [1, 3]}
    assert (recording.ranks, recording.missing_ranks) == ((1, 3), ())


def test_directories_of_ranks_beyond_the_world_are_ignored(tmp_path: Path) -> None:
    write(tmp_path / "run")
    (tmp_path / "run/rank-00007").mkdir()
    (tmp_path / "run/rank-1").mkdir()

    assert open_recording(str(tmp_path / "run")).ranks == (0,)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"world_size": 4, "mesh": None}, "number of ranks is 2 in run.json and 4 in rank 1's"),
        (
            {"world_size": 2, "mesh": {"engine": "fully_shard", "data_parallel": 2}},
            "engine is DistributedDataParallel in run.json and fully_shard in rank 1's",
        ),
        (
            {"world_size": 2, "mesh": {"engine": "DistributedDataParallel", "data_parallel": 1, "model_parallel": 2}},
            "data parallel is 2 in run.json and 1 in rank 1's",
        ),
    ],
)
def test_ranks_of_different_runs_are_refused(content: dict[str, Any], message: str, tmp_path: Path) -> None:
    run = {**RUN, "world_size": 2, "mesh": {"engine": "DistributedDataParallel", "data_parallel": 2}}
    for rank in range(2):
        writer = RecordingWriter(str(tmp_path / "run"), run=run, rank=rank, world_size=2)
        writer.write_rank(content if rank else {"world_size": 2, "mesh": run["mesh"]})
        writer.close()
    recording = open_recording(str(tmp_path / "run"))

    with pytest.raises(MixedRecordingError) as raised:
        recording.rank_content(1)

    assert message in str(raised.value)
    assert "overwrite=True" in str(raised.value)


def test_a_rank_may_end_before_it_knows_of_its_pipeline(tmp_path: Path) -> None:
    run = {**RUN, "world_size": 2, "mesh": {"engine": "by hand", "data_parallel": 1, "pipeline": 2}}
    for rank in range(2):
        writer = RecordingWriter(str(tmp_path / "run"), run=run, rank=rank, world_size=2)
        writer.write_rank({"world_size": 2, "mesh": {"engine": "by hand", "data_parallel": 2}})
        writer.close()

    assert open_recording(str(tmp_path / "run")).rank_content(1)["world_size"] == 2


def _two_ranks(path: Path) -> None:
    for rank in range(2):
        writer = RecordingWriter(str(path), run={**RUN, "world_size": 2}, rank=rank, world_size=2)
        writer.write_rank({"world_size": 2})
        writer.close()


@pytest.mark.parametrize("names", [("rank-00000", "rank-00001"), ("rank-00000/rank.json", "rank-00001/rank.json")])
def test_ranks_that_were_swapped_are_refused(names: tuple[str, str], tmp_path: Path) -> None:
    _two_ranks(tmp_path / "run")
    first, second = (tmp_path / "run" / name for name in names)
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    recording = open_recording(str(tmp_path / "run"))

    for rank in range(2):
        with pytest.raises(MixedRecordingError, match=f"rank-0000{rank} holds rank {1 - rank}, as its rank.json says"):
            recording.rank_content(rank)


def test_a_closed_rank_whose_file_is_gone_is_not_whole(tmp_path: Path) -> None:
    _two_ranks(tmp_path / "run")
    (tmp_path / "run/rank-00001/rank.json").unlink()
    recording = open_recording(str(tmp_path / "run"))

    assert recording.status(0).ending == "closed"
    assert recording.status(1).ending == "truncated"
    assert recording.status(1).message == (
        "rank 1: its rank.json is missing, although it was closed. Restore it from where the recording was copied."
    )


def test_a_rank_of_which_nothing_was_said_has_a_file_once_it_is_closed(tmp_path: Path) -> None:
    writer = RecordingWriter(str(tmp_path / "run"), run=RUN)
    assert not (tmp_path / "run/rank-00000/rank.json").exists()
    writer.close()

    recording = open_recording(str(tmp_path / "run"))
    assert recording.status(0).ending == "closed"
    assert recording.rank_content(0) == {}
