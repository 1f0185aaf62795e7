"""`traindiff prune`: what it removes, and what it leaves alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.analyse.compact.made_up_ranks import record_ranks, writers_of
from tests.analyse.compact.test_compacting import CHANGES
from tests.compacted import verdict_of
from traindiff.analyse.compact.compacting import ASKED, compact, default_output
from traindiff.analyse.compact.pruning import prune
from traindiff.errors import ConfigError, RecordingError
from traindiff.storage import Follower, RecordingWriter, manifest, open_recording


def test_pruning_replaces_a_recording(tmp_path: Path) -> None:
    path = record_ranks(tmp_path / "run", CHANGES["a copy"], steps=6)
    before = verdict_of(path)
    made = prune(path, whole_every=5)

    assert [one.name for one in tmp_path.iterdir()] == ["run"]
    assert made.whole == {ASKED: 2}
    assert open_recording(str(path)).is_compact
    assert verdict_of(path) == before


def test_a_recording_is_kept_if_its_compact_form_says_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = record_ranks(tmp_path / "run")
    saids = iter([{"findings": []}, {"findings": ["one"]}])
    monkeypatch.setattr("traindiff.analyse.compact.pruning._said", lambda verdict: next(saids))

    with pytest.raises(Exception, match="stays as it is"):
        prune(path)
    assert not open_recording(str(path)).is_compact
    assert [one.name for one in tmp_path.iterdir()] == ["run"]


def busy(*_: Any, **__: Any) -> None:
    raise OSError(16, "Device or resource busy")


def rename_unless(is_busy: Callable[[Path, Path], bool]) -> Any:
    """In place of `Path.rename`: it fails for some paths and targets."""
    rename = Path.rename
    return lambda path, target: busy() if is_busy(path, Path(target)) else rename(path, target)


def test_a_recording_whose_place_cannot_be_taken_gets_its_name_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = record_ranks(tmp_path / "run", CHANGES["a copy"])
    before = verdict_of(path)
    monkeypatch.setattr(Path, "rename", rename_unless(lambda one, to: ".pruned-" in one.name and to == path))
    with pytest.raises(RecordingError, match=r"stays as it is: .* \(Device or resource busy\)"):
        prune(path)

    assert [one.name for one in tmp_path.iterdir()] == ["run"]
    assert not open_recording(str(path)).is_compact
    assert verdict_of(path) == before


def test_it_is_said_where_a_recording_is_that_lost_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = record_ranks(tmp_path / "run")
    before = verdict_of(path)
    monkeypatch.setattr(Path, "rename", rename_unless(lambda one, to: to == path))
    with pytest.raises(RecordingError, match="It is whole: give it its name again") as told:
        prune(path)

    (kept,) = tmp_path.iterdir()
    assert str(kept) in str(told.value)
    assert verdict_of(kept) == before


def test_it_is_said_what_is_left_of_a_recording_that_was_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = record_ranks(tmp_path / "run")
    remove = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda one, **how: busy() if ".replaced-" in str(one) else remove(one, **how))
    with pytest.raises(
        RecordingError, match="is now its compact form, but what it replaces could not be removed"
    ) as told:
        prune(path)

    assert open_recording(str(path)).is_compact
    (left,) = [one for one in tmp_path.iterdir() if one != path]
    assert str(left) in str(told.value)


TOKEN = "0123456789cd"


def names_in(directory: Path) -> list[str]:
    return sorted(one.name for one in directory.iterdir())


def test_a_recording_that_is_being_written_stays(tmp_path: Path) -> None:
    path = tmp_path / "run"
    writers = writers_of(path, world_size=2)
    for step in range(3):
        for write, _ in writers:
            write(step, CHANGES["nothing"])
    with pytest.raises(RecordingError, match=r"is being recorded at the moment \(rank-00000, rank-00001\)"):
        prune(path)
    for step in range(3, 6):
        for write, _ in writers:
            write(step, CHANGES["nothing"])
    writers[0][1]()
    with pytest.raises(RecordingError, match=r"is being recorded at the moment \(rank-00001\)"):
        prune(path)
    writers[1][1]()

    assert names_in(tmp_path) == ["run"]
    assert not open_recording(str(path)).is_compact
    assert len(list(open_recording(str(path)).steps(1))) == 6
    assert prune(path).steps == 6


def test_a_recording_that_was_written_to_meanwhile_stays(tmp_path: Path) -> None:
    path = record_ranks(tmp_path / "run")

    def add(step: int) -> None:
        if step == 1:
            shutil.copytree(path / "rank-00003", path / "rank-00007")

    with pytest.raises(RecordingError, match="stays as it is"):
        prune(path, progress=add)
    assert names_in(tmp_path) == ["run"]
    assert not open_recording(str(path)).is_compact


def test_other_files_stay_where_they_are(tmp_path: Path) -> None:
    path = record_ranks(tmp_path / "run")
    others = ["notes.txt", "checkpoints/step-1/model.pt", "rank-00001/mine.txt", "rank-00002/more/of-it"]
    others += ["merged/adapter.safetensors", "places/mine.txt"]
    for name in others:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(name)
    (path / "latest").symlink_to("checkpoints/step-1")
    made, size = prune(path), sum(len(name) for name in others)

    assert open_recording(str(path)).is_compact
    assert [(path / name).read_text() for name in others] == others
    assert (path / "latest" / "model.pt").read_text() == others[1]
    held = sum(one.lstat().st_size for one in path.rglob("*") if one.is_file() and not one.is_symlink())
    assert made.bytes_after + size == held
    assert names_in(tmp_path) == ["run"]
    verdict_of(path)
    prune(path)  # compact already
    assert [(path / name).read_text() for name in others] == others


def test_what_a_link_leads_to_is_replaced(tmp_path: Path) -> None:
    path = record_ranks(tmp_path / "run")
    (tmp_path / "link").symlink_to("run")
    assert prune(tmp_path / "link").output == str(tmp_path / "link")

    assert (tmp_path / "link").is_symlink()
    assert open_recording(str(path)).is_compact
    assert names_in(tmp_path) == ["link", "run"]


def test_the_working_directory_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = record_ranks(tmp_path / "run")
    monkeypatch.chdir(path)
    assert default_output(".") == f"{path}-compact"
    assert default_output("..") == f"{tmp_path}-compact"
    assert default_output("../run/") == "../run-compact"
    assert default_output("s3://bucket/run") == "s3://bucket/run-compact"
    prune(".")
    monkeypatch.chdir(tmp_path)
    assert open_recording(str(path)).is_compact


@pytest.mark.parametrize("name", ["a", "rank", "last"])
def test_a_recording_may_be_called_as_a_word_of_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = record_ranks(tmp_path / name)
    data = path / "rank-00001" / "observations.arrows"
    data.write_bytes(data.read_bytes()[:-200])
    monkeypatch.chdir(tmp_path)
    assert any(name in note for note in verdict_of(path)["notes"])
    prune(name)
    assert open_recording(name).is_compact


def test_nothing_is_made_inside_the_recording(tmp_path: Path) -> None:
    path = record_ranks(tmp_path / "run")
    (tmp_path / "link").symlink_to("run")
    for inside in (path / "small", path / "a" / "b", tmp_path / "link" / "small"):
        with pytest.raises(ConfigError, match="is inside the recording"):
            compact(path, inside)
    assert "small" not in names_in(path)


def test_a_recording_stays_whose_compact_form_is_not_smaller(tmp_path: Path) -> None:
    path = record_ranks(tmp_path / "run")
    prune(path)
    kept = {one.name: one.read_bytes() for one in (path / "merged").iterdir()}
    made = prune(path)

    assert made.is_kept
    assert str(made).startswith(f"{path} stays as it is: its compact form would take")
    assert {one.name: one.read_bytes() for one in (path / "merged").iterdir()} == kept
    assert names_in(tmp_path) == ["run"]


def test_what_was_left_by_a_process_that_was_killed_is_finished(tmp_path: Path) -> None:
    path = record_ranks(tmp_path / "run")
    whole = verdict_of(path)
    # Killed while it compacted, and while it checked.
    shutil.copytree(path, tmp_path / f"run.pruned-{TOKEN}.unfinished-17")
    compact(path, tmp_path / "run.pruned-0123456789ab")
    # Killed between the two renames.
    path.rename(tmp_path / f"run.replaced-{TOKEN}")
    prune(path)

    assert names_in(tmp_path) == ["run"]
    assert open_recording(str(path)).is_compact
    assert verdict_of(path) == whole


def test_what_was_not_removed_in_time_is_removed_later(tmp_path: Path) -> None:
    path = record_ranks(tmp_path / "run", CHANGES["a copy"])
    (path / "notes.txt").write_text("mine")
    path.rename(tmp_path / f"run.replaced-{TOKEN}")
    compact(tmp_path / f"run.replaced-{TOKEN}", path)
    (tmp_path / "run.pruned-final").mkdir()  # somebody's own
    assert prune(path).is_kept

    assert names_in(tmp_path) == ["run", "run.pruned-final"]
    assert (path / "notes.txt").read_text() == "mine"


def test_a_training_can_write_to_its_directories_all_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, rename, seen = record_ranks(tmp_path / "run"), Path.rename, list[str]()
    (path / "checkpoints" / "empty").mkdir(parents=True)
    (path / "checkpoints").chmod(0o700)
    (path / "checkpoints" / "1.pt").write_text("one")

    def write(self: Path, target: Path) -> Path:
        moved = rename(self, target)
        if target.is_dir() and target.name == "run":  # the compact form is in place, and nothing was moved yet
            seen.append(self.name)
            (path / "checkpoints" / "empty" / "2.pt").write_text("two")
        return moved

    monkeypatch.setattr(Path, "rename", write)
    prune(path)
    assert len(seen) == 1
    assert (path / "checkpoints").stat().st_mode & 0o777 == 0o700
    assert (path / "checkpoints" / "1.pt").read_text() == "one"
    assert (path / "checkpoints" / "empty" / "2.pt").read_text() == "two"
    assert names_in(tmp_path) == ["run"]


def test_what_is_left_of_another_recording_is_left_alone(tmp_path: Path) -> None:
    path = record_ranks(tmp_path / "run")
    prune(path)
    other = manifest.load_run((path / "run.json").read_bytes(), where="") | {"created": "2020-01-01T00:00:00+00:00"}
    for name in (f"run.pruned-{TOKEN}", f"run.replaced-{TOKEN}"):
        shutil.copytree(path, tmp_path / name)
        (tmp_path / name / "run.json").write_bytes(manifest.dump(other))
    (tmp_path / f"run.pruned-{TOKEN}.unfinished-17").mkdir()  # of which nothing tells whose it is
    shutil.copytree(path, tmp_path / "run.replaced-12")  # somebody's own
    before = names_in(tmp_path)
    prune(path)
    assert names_in(tmp_path) == before


def test_what_cannot_be_finished_stays(tmp_path: Path) -> None:
    path = record_ranks(tmp_path / "run")
    shutil.copytree(path, tmp_path / f"run.replaced-{TOKEN}")
    for one in (path, tmp_path / f"run.replaced-{TOKEN}"):
        (one / "latest.pt").write_text(one.name)
    prune(path)

    assert open_recording(str(path)).is_compact
    assert names_in(tmp_path) == ["run", f"run.replaced-{TOKEN}"]
    assert (tmp_path / f"run.replaced-{TOKEN}" / "latest.pt").read_text() == f"run.replaced-{TOKEN}"


def test_a_process_that_is_at_work_is_left_alone(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    path = record_ranks(tmp_path / "run")
    with (path / "run.json").open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(RecordingError, match="another process is about to replace it"):
            prune(path)
    assert not open_recording(str(path)).is_compact
    assert names_in(tmp_path) == ["run"]


def test_a_recording_that_begins_in_its_place_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is known that nobody writes there, nobody can begin before the compact form is in its place."""
    path, rename, refused = record_ranks(tmp_path / "run"), Path.rename, list[str]()

    def begin(self: Path, target: Path) -> Path:
        with pytest.raises(ConfigError, match="is being recorded at the moment") as told:
            RecordingWriter(str(path), run={"world_size": 1, "settings": {}}, overwrite=True)
        refused.append(str(told.value))
        monkeypatch.setattr(Path, "rename", rename)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", lambda self, to: begin(self, to) if self == path else rename(self, to))
    prune(path)
    assert len(refused) == 1
    assert open_recording(str(path)).is_compact


def test_a_compact_form_that_is_not_whole_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, rename = record_ranks(tmp_path / "run"), Path.rename
    before = verdict_of(path)

    def put(self: Path, target: Path) -> Path:
        if ".pruned-" in self.name and target == path:
            (self / "merged" / "observations.arrows").unlink()
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", put)
    with pytest.raises(RecordingError, match=r"stays as it is: .*a part of it was removed"):
        prune(path)
    assert verdict_of(path) == before
    assert names_in(tmp_path) == ["run"]


def test_ranks_may_take_a_while_to_let_go(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    path, now = record_ranks(tmp_path / "run"), [0.0]
    held = (path / "rank-00001" / "observations.arrows").open("r+b")
    fcntl.flock(held, fcntl.LOCK_EX)

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 5.0:
            held.close()

    assert prune(path, follow=Follower(30.0, sleep=sleep, clock=lambda: now[0])).steps > 0
    assert open_recording(str(path)).is_compact
    assert 5.0 < now[0] < 8.0
