"""What may be replaced: recordings, when asked to. Everything else is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storage.samples import RUN, read, step, write
from traindiff.errors import ConfigError
from traindiff.storage import RecordingWriter, open_recording


def everything(directory: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in sorted(directory.rglob("*")) if file.is_file()}


def test_an_existing_recording_is_refused_and_untouched(tmp_path: Path) -> None:
    write(tmp_path / "run")
    before = everything(tmp_path)

    with pytest.raises(ConfigError) as caught:
        write(tmp_path / "run")

    assert str(caught.value) == (
        "1 problem in record(...); nothing was attached to the model.\n"
        "\n"
        f"  record(path='{tmp_path}/run')\n"
        "    already holds a recording.\n"
        "    Give another path, or overwrite=True to replace it."
    )
    assert everything(tmp_path) == before


def test_overwriting_replaces_all_of_the_old_recording(tmp_path: Path) -> None:
    old = {**RUN, "world_size": 3, "old": True}
    for rank in range(3):
        writer = RecordingWriter(str(tmp_path / "run"), run=old, rank=rank, world_size=3)
        writer.write_rank({"old": True})
        writer.write_step(*step(7))
        writer.close()

    RecordingWriter(str(tmp_path / "run"), run=RUN, overwrite=True).close()

    recording = open_recording(str(tmp_path / "run"))
    assert "old" not in recording.run
    assert recording.rank_content(0) == {}
    assert read(tmp_path / "run") == []
    assert not (tmp_path / "run/rank-00001").exists()
    assert not (tmp_path / "run/rank-00002").exists()


def test_a_damaged_or_newer_recording_can_be_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "run")
    run = tmp_path / "run/run.json"
    run.write_bytes(run.read_bytes().replace(b'"version": 1', b'"version": 9'))

    write(tmp_path / "run", steps=1, overwrite=True)

    assert len(read(tmp_path / "run")) == 1


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "files",
    [
        ["notes.txt"],
        ["run.json", "checkpoint.pt"],
        ["run.json"],
        ["rank-notes.txt"],
        ["rank-1/data"],
        ["rank-00000/precious.txt"],
        ["rank-00009/precious.txt"],
        ["rank-00000/observations.arrows", "rank-00000/mine.txt"],
        ["rank-00000"],
    ],
)
def test_a_directory_with_other_things_is_refused_and_untouched(
    tmp_path: Path, files: list[str], overwrite: bool
) -> None:
    for file in files:
        (tmp_path / "run" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / file).write_text('{"format": "another"}')
    before = everything(tmp_path)

    with pytest.raises(ConfigError, match="holds other things than a recording"):
        write(tmp_path / "run", overwrite=overwrite)

    assert everything(tmp_path) == before


def test_other_things_beside_a_recording_are_named(tmp_path: Path) -> None:
    write(tmp_path / "run")
    for name in ("a.txt", "b.txt", "c.txt", "d.txt"):
        (tmp_path / "run" / name).touch()

    with pytest.raises(ConfigError) as caught:
        write(tmp_path / "run", overwrite=True)

    assert str(caught.value) == (
        "1 problem in record(...); nothing was attached to the model.\n"
        "\n"
        f"  record(path='{tmp_path}/run')\n"
        "    is a directory that holds other things than a recording (a.txt, b.txt, c.txt).\n"
        "    Give the path of a directory that does not exist yet. overwrite=True replaces recordings, nothing else."
    )


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_is_refused_and_untouched(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "run").write_text("text")

    with pytest.raises(ConfigError, match=r"is a file, and a recording is a directory\."):
        write(tmp_path / "run", overwrite=overwrite)

    assert (tmp_path / "run").read_text() == "text"


def test_an_empty_directory_may_be_used(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()

    write(tmp_path / "run", steps=1)

    assert len(read(tmp_path / "run")) == 1


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
@pytest.mark.parametrize("overwrite", [False, True])
def test_the_ranks_of_a_run_may_start_in_any_order(tmp_path: Path, order: tuple[int, ...], overwrite: bool) -> None:
    for rank in order:
        writer = RecordingWriter(
            str(tmp_path / "run"), run={**RUN, "world_size": 3}, rank=rank, world_size=3, overwrite=overwrite
        )
        writer.write_step(*step(rank))
        writer.close()

    assert open_recording(str(tmp_path / "run")).ranks == (0, 1, 2)
    assert [read(tmp_path / "run", rank)[0].step for rank in range(3)] == [0, 1, 2]


def test_a_rank_left_over_from_a_larger_run_is_not_removed_unasked(tmp_path: Path) -> None:
    RecordingWriter(str(tmp_path / "run"), run=RUN, rank=5, world_size=8).close()
    before = everything(tmp_path)

    with pytest.raises(ConfigError, match="already holds a recording"):
        write(tmp_path / "run")

    assert everything(tmp_path) == before


def test_a_file_left_unfinished_by_a_kill_does_not_prevent_overwriting(tmp_path: Path) -> None:
    write(tmp_path / "run")
    (tmp_path / "run/run.json.unfinished").touch()
    (tmp_path / "run/rank-00000/rank.json.unfinished").touch()

    write(tmp_path / "run", steps=1, overwrite=True)

    assert len(read(tmp_path / "run")) == 1
