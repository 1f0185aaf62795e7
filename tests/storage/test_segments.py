"""A rank's stream on an object store: segments that are joined, and read as one stream, wherever they lie."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem

from tests.storage.failing_store import FailingStore, s3_in_memory
from tests.storage.samples import RUN, step
from traindiff.core.untrusted.folder import Folder
from traindiff.errors import ConfigError, CorruptRecordingError
from traindiff.storage import RecordingWriter, open_recording, segments, stored_files
from traindiff.storage.location import SEGMENT
from traindiff.storage.segments import Segment, segments_of
from traindiff.storage.stores import Store

RANK = "/bucket/run/rank-00000"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FailingStore:
    monkeypatch.setattr(segments, "_PAUSE_SECONDS", 0.0)
    return s3_in_memory(monkeypatch)


def begin(path: str = "s3://bucket/run") -> RecordingWriter:
    writer = RecordingWriter(path, run=RUN)
    writer.write_rank({"model": "Sample"})
    return writer


def upload_each(writer: RecordingWriter, numbers: Iterator[int] | range) -> None:
    """Steps with an upload each."""
    for number in numbers:
        writer.write_step(*step(number))
        writer._files.uploads.flush()


def names(store: FailingStore) -> list[str]:
    found = [one.rpartition("/")[2] for one in store.find(RANK)]
    return sorted(name for name in found if SEGMENT.fullmatch(name))


def read(path: str | Path) -> list[int]:
    return [one.step for one in open_recording(str(path)).steps(0)]


@pytest.mark.usefixtures("store")
def test_a_step_is_kept_as_soon_as_it_is_uploaded() -> None:
    writer = begin()
    for number in range(5):
        upload_each(writer, range(number, number + 1))
        assert read("s3://bucket/run") == list(range(number + 1))
        assert open_recording("s3://bucket/run").status(0).ending == "unclosed"


def test_what_is_read_is_what_a_local_recording_holds(store: FailingStore, tmp_path: Path) -> None:
    for writer in (begin(), begin(str(tmp_path / "run"))):
        for number in range(5):
            writer.write_step(*step(number))
        writer.close()

    (segment,) = names(store)
    length = int(SEGMENT.fullmatch(segment)[2])  # type: ignore[index]
    content = store.cat_file(f"{RANK}/{segment}")
    assert content[:length] == (tmp_path / "run/rank-00000/observations.arrows").read_bytes()
    assert content[length:] == (tmp_path / "run/rank-00000/observations.crc").read_bytes()
    assert open_recording("s3://bucket/run").status(0).ending == "closed"


def test_segments_are_few_however_many_uploads_there_are(store: FailingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_files, "JOINED", 4)
    writer = begin()
    most = 0
    for number in range(70):
        upload_each(writer, range(number, number + 1))
        most = max(most, len(names(store)))
        assert read("s3://bucket/run") == list(range(number + 1))
    writer.close()

    assert most <= 3 * 4  # 3 of each of the sizes 1, 4, 16 and 64
    assert len(names(store)) == 1
    assert read("s3://bucket/run") == list(range(70))


def test_long_segments_are_left_alone_and_not_kept_in_memory(
    store: FailingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_files, "SEGMENT_BYTES", 20_000)  # a step has 7,712
    writer = begin()
    upload_each(writer, range(12))
    assert sum(len(one.messages) for one in writer._files._open) < 20_000
    writer.close()

    lengths = [int(name[-18:-8]) for name in names(store)]
    assert all(length >= 20_000 for length in lengths[:-1])
    assert len(lengths) == 5
    assert read("s3://bucket/run") == list(range(12))


def test_without_the_right_to_remove_nothing_is_joined_and_everything_is_kept(
    store: FailingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(method: str, _path: str) -> None:
        if method == "rm":
            raise PermissionError("Forbidden")

    monkeypatch.setattr(stored_files, "JOINED", 3)
    writer = begin()
    store.refuse = refuse
    upload_each(writer, range(10))
    writer.close()

    assert read("s3://bucket/run") == list(range(10))
    assert open_recording("s3://bucket/run").status(0).ending == "closed"
    assert sum(int(name[-18:-8]) for name in names(store)) < 2 * 10 * 7_712


def test_of_segments_that_begin_at_one_place_the_longest_holds_the_others() -> None:
    def named(*ranges: tuple[int, int]) -> dict[str, int]:
        return {f"observations-{first:015d}-{length:010d}.segment": length + 9 for first, length in ranges}

    found = segments_of({**named((0, 5), (0, 12), (5, 7), (12, 3), (15, 0), (20, 4)), "rank.json": 3})
    assert [(one.first, one.length) for one in found] == [(0, 12), (12, 3)]
    assert found[0] == Segment(first=0, length=12, size=21)
    assert segments_of({"observations.arrows": 3}) == []


@pytest.mark.usefixtures("store")
def test_segments_that_are_joined_while_they_are_read_do_not_disturb_the_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer = begin()
    upload_each(writer, range(5))
    recording = open_recording("s3://bucket/run")
    steps = recording.steps(0)
    found = [next(steps).step]
    monkeypatch.setattr(stored_files, "JOINED", 3)
    upload_each(writer, range(5, 9))  # now the first segments are gone
    found += [one.step for one in steps]

    assert found == [0, 1, 2, 3, 4]
    assert read("s3://bucket/run") == list(range(9))


@pytest.mark.usefixtures("store")
def test_a_recording_that_grows_is_read_as_it_is_at_each_time() -> None:
    writer = begin()
    recording = open_recording("s3://bucket/run")
    for number in range(3):
        upload_each(writer, range(number, number + 1))
        assert [one.step for one in recording.steps(0)] == list(range(number + 1))
        assert recording.status(0).ending == "unclosed"
    writer.close()
    assert recording.status(0).ending == "closed"


@pytest.mark.usefixtures("store")
def test_seals_that_are_joined_while_the_end_is_looked_at_are_those_of_the_same_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer = begin()
    upload_each(writer, range(5))
    folder = segments.of_rank(Folder(open_recording("s3://bucket/run")._fs, RANK))
    size = folder.size("observations.arrows")
    monkeypatch.setattr(stored_files, "JOINED", 3)
    upload_each(writer, range(5, 9))

    lines = folder.open("observations.crc").read().decode().splitlines()
    assert len(lines) == 6  # the schema and five steps
    offset, length, _ = lines[-1].split()
    assert int(offset) + int(length) == size


def test_a_recording_that_was_copied_from_a_store_to_a_disk_is_read_there(store: FailingStore, tmp_path: Path) -> None:
    writer = begin()
    upload_each(writer, range(4))
    for path in store.find("/bucket/run"):
        copy = tmp_path / path.removeprefix("/bucket/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(store.cat_file(path))

    assert len(names(store)) > 1
    assert read(tmp_path / "run") == [0, 1, 2, 3]
    assert open_recording(str(tmp_path / "run")).status(0).ending == "unclosed"


def test_a_recording_that_was_copied_from_a_disk_to_a_store_is_read_there(store: FailingStore, tmp_path: Path) -> None:
    writer = begin(str(tmp_path / "run"))
    for number in range(4):
        writer.write_step(*step(number))
    writer.close()
    for path in (tmp_path / "run").rglob("*.*"):
        store.pipe_file(f"/bucket/copied/{path.relative_to(tmp_path / 'run')}", path.read_bytes())

    assert read("s3://bucket/copied") == [0, 1, 2, 3]
    assert open_recording("s3://bucket/copied").status(0).ending == "closed"


def test_a_flipped_bit_in_a_segment_is_damage(store: FailingStore) -> None:
    writer = begin()
    upload_each(writer, range(3))
    path = f"{RANK}/{names(store)[-1]}"
    content = bytearray(store.cat_file(path))
    content[1000] ^= 1
    store.pipe_file(path, bytes(content))

    with pytest.raises(CorruptRecordingError, match="checksum"):
        read("s3://bucket/run")


@pytest.mark.usefixtures("store")
def test_seals_without_end_are_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    begin().close()
    monkeypatch.setattr(segments, "MOST_SEALS_BYTES", 10)
    with pytest.raises(CorruptRecordingError, match="bytes of seals, and may have 10"):
        open_recording("s3://bucket/run").status(0)


@pytest.mark.usefixtures("store")
def test_a_recording_is_replaced_only_if_that_is_asked_for() -> None:
    writer = begin()
    upload_each(writer, range(3))
    writer.close()
    with pytest.raises(ConfigError, match="already holds a recording"):
        begin()

    writer = RecordingWriter("s3://bucket/run", run=RUN, overwrite=True)
    upload_each(writer, range(1))
    writer.close()
    assert read("s3://bucket/run") == [0]


def test_a_store_without_whole_files_shows_no_part_of_one(tmp_path: Path) -> None:
    """Any other file system of fsspec, e.g. one over SSH: a file gets its name when it is complete."""
    seen: list[str] = []
    store = Store(LocalFileSystem(), "sftp")
    pipe = store._pipe
    store._pipe = lambda given: (seen.extend(given), pipe(given))  # type: ignore[method-assign]
    store.put_files({f"{tmp_path}/run/rank-00000/rank.json": b"{}"})

    assert seen == [f"{tmp_path}/run/rank-00000/rank.json.unfinished"]
    assert (tmp_path / "run/rank-00000/rank.json").read_bytes() == b"{}"
    assert [one.name for one in (tmp_path / "run/rank-00000").iterdir()] == ["rank.json"]
