"""What somebody else does to the files of a recording while it is written is noticed, and said."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pytest

from tests.storage.samples import RUN, content, read, step, write
from traindiff.core.summary import Detail, RawTensor
from traindiff.errors import LostFilesError
from traindiff.storage import RecordingWriter, open_recording

RANK = "rank-00000"


def _replaced(run: Path) -> None:
    stream = run / RANK / "observations.arrows"
    stream.unlink()
    stream.write_bytes(b"x" * 10**6)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "removed": (shutil.rmtree, "run is no longer there: it was moved, deleted or unmounted"),
    "moved": (lambda run: run.rename(f"{run}-moved"), "run is no longer there"),
    "rank removed": (lambda run: shutil.rmtree(run / RANK), f"{RANK} is no longer there"),
    "stream removed": (lambda run: (run / RANK / "observations.arrows").unlink(), "arrows is no longer there"),
    "seals removed": (lambda run: (run / RANK / "observations.crc").unlink(), "crc is no longer there"),
    "run.json removed": (lambda run: (run / "run.json").unlink(), "Without it the recording cannot be read"),
    "rank.json removed": (lambda run: (run / RANK / "rank.json").unlink(), "what the rank holds of the model"),
    "stream cut": (lambda run: os.truncate(run / RANK / "observations.arrows", 3000), "holds 3,000 of the"),
    "seals cut": (lambda run: os.truncate(run / RANK / "observations.crc", 7), "holds 7 of the"),
    "run.json cut": (lambda run: os.truncate(run / "run.json", 0), "holds 0 of the"),
    "stream replaced": (_replaced, "is another file now"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_next_step_says_what_is_lost_and_nothing_is_made_again(change: str, tmp_path: Path) -> None:
    act, message = CHANGES[change]
    writer = write(tmp_path / "run", steps=3, close=False)
    act(tmp_path / "run")
    left = sorted(tmp_path.rglob("*"))

    with pytest.raises(LostFilesError, match=message) as caught:
        writer.write_step(*step(3))
    with pytest.raises(OSError, match="nothing is written behind the gap"):
        writer.write_step(*step(4))
    writer.close()

    assert "3 steps" in str(caught.value) or "Without it" in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == left


@pytest.mark.parametrize("change", CHANGES)
def test_closing_says_what_is_lost(change: str, tmp_path: Path) -> None:
    act, message = CHANGES[change]
    writer = write(tmp_path / "run", steps=3, close=False)
    act(tmp_path / "run")

    with pytest.raises(LostFilesError, match=message):
        writer.close()
    writer.close()

    assert writer._files.data.closed
    assert writer._files.seals.closed


def test_what_was_moved_says_so_where_it_is_now(tmp_path: Path) -> None:
    writer = write(tmp_path / "run", steps=3, close=False)
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(LostFilesError):
        writer.write_step(*step(3))
    writer.close()

    assert [one.step for one in read(tmp_path / "moved")] == [0, 1, 2]
    assert (
        "was moved, deleted or unmounted; the steps that are left"
        in open_recording(str(tmp_path / "moved")).status(0).message
    )


def test_steps_before_what_was_cut_off_are_kept(tmp_path: Path) -> None:
    writer = write(tmp_path / "run", steps=3, close=False)
    whole = content(tmp_path / "run")
    stream = tmp_path / "run" / RANK / "observations.arrows"
    os.truncate(stream, stream.stat().st_size - 5)
    with pytest.raises(LostFilesError):
        writer.write_step(*step(3))
    writer.close()

    assert content(tmp_path / "run") == whole[:2]
    assert (
        "it was cut short; the steps that are left are used" in open_recording(str(tmp_path / "run")).status(0).message
    )


def detailed(number: int) -> tuple[object, ...]:
    values = np.arange(6, dtype=np.float32)
    tensor = RawTensor(dtype="float32", shape=(6,), data=values.tobytes())
    return (*step(number), {0: Detail(tensors={"value": tensor}), 1: Detail(tensors={"value": tensor})})


def _folder(run: Path) -> Path:
    return run / RANK / "tensors/step-000000"


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda run: shutil.rmtree(run / RANK / "tensors"), "no longer there"),
        (lambda run: next(_folder(run).iterdir()).unlink(), "holds 1 of the 2 files that were written"),
        (lambda run: os.truncate(next(_folder(run).iterdir()), 9), "it was cut short"),
    ],
    ids=["folder", "file", "cut"],
)
def test_tensors_that_are_gone_are_said_when_the_recording_is_closed(
    act: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    writer = RecordingWriter(str(tmp_path / "run"), run=RUN)
    for number in range(2):
        writer.write_step(*detailed(number))  # type: ignore[arg-type]
    act(tmp_path / "run")

    with pytest.raises(LostFilesError, match=message):
        writer.close()


def test_a_removed_directory_is_not_made_again_for_tensors(tmp_path: Path) -> None:
    writer = RecordingWriter(str(tmp_path / "run"), run=RUN)
    writer.write_step(*detailed(0))  # type: ignore[arg-type]
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(LostFilesError):
        writer.write_step(*detailed(1))  # type: ignore[arg-type]
    writer.close()

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("gone", ["observations-*", "rank.json", "tensors/*/*"])
def test_other_file_systems_are_looked_at_when_the_recording_is_closed(gone: str) -> None:
    memory = fsspec.filesystem("memory")
    writer = RecordingWriter("memory://lost/run", run=RUN, overwrite=True)
    writer.write_rank({"model": "Sample"})
    writer.write_step(*detailed(0))  # type: ignore[arg-type]
    # What waits is uploaded when the recording is closed: it is removed in the moment before it is looked at.
    look = writer._files.lost_at_the_end
    monkey = pytest.MonkeyPatch()
    monkey.setattr(
        writer._files, "lost_at_the_end", lambda: (memory.rm(memory.glob(f"/lost/run/{RANK}/{gone}")), look())[1]
    )

    with pytest.raises(LostFilesError, match="no longer there"):
        writer.close()
    monkey.undo()
    memory.rm("/lost", recursive=True)


def test_a_whole_recording_elsewhere_is_not_called_lost() -> None:
    writer = RecordingWriter("memory://kept/run", run=RUN, overwrite=True)
    writer.write_rank({"model": "Sample"})
    for number in range(2):
        writer.write_step(*detailed(number))  # type: ignore[arg-type]
    writer.close()

    assert open_recording("memory://kept/run").status(0).ending == "closed"
    fsspec.filesystem("memory").rm("/kept", recursive=True)
