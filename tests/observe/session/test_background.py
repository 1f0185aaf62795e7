"""Steps are written on a thread of their own, in order, and nothing is lost in silence."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from tests.storage.full_disk import FullDisk
from tests.storage.samples import RUN, content, step
from traindiff.core.kernels.rows import Deferred
from traindiff.errors import ConfigError
from traindiff.observe.common.writing import DEPTH, BackgroundWriter, opened_in_time
from traindiff.storage import RecordingWriter, open_recording


@pytest.fixture
def files(tmp_path: Path) -> RecordingWriter:
    return RecordingWriter(str(tmp_path / "run"), run=RUN)


class Stuck:
    """A file system that takes nothing until it is released."""

    def __init__(self, files: RecordingWriter, monkeypatch: pytest.MonkeyPatch) -> None:
        self.released = threading.Event()
        write_step = files.write_step

        def wait(*args: object) -> None:
            self.released.wait(30)
            write_step(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(files, "write_step", wait)


def test_steps_are_written_in_order_and_closing_waits_for_all_of_them(files: RecordingWriter, tmp_path: Path) -> None:
    writer = BackgroundWriter(files)
    for number in range(10):
        writer.write_step(*step(number))
    writer.close()

    assert [number for _, number, _, _ in content(tmp_path / "run")] == list(range(10))
    assert open_recording(str(tmp_path / "run")).status(0).ending == "closed"


def test_a_step_is_on_disk_when_its_call_returns(files: RecordingWriter, tmp_path: Path) -> None:
    writer = BackgroundWriter(files, prompt_seconds=20)
    for number in range(3):
        writer.write_step(*step(number))
        assert len(content(tmp_path / "run")) == number + 1
    writer.close()


def test_the_training_does_not_wait_for_a_slow_file_system(
    files: RecordingWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Stuck(files, monkeypatch)
    writer = BackgroundWriter(files, patience_seconds=20, prompt_seconds=0.01)
    for number in range(DEPTH):
        writer.write_step(*step(number))
    assert content(tmp_path / "run") == []

    stuck.released.set()
    writer.close()
    assert len(content(tmp_path / "run")) == DEPTH


def test_a_file_system_that_takes_nothing_is_an_error_after_a_while(
    files: RecordingWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Stuck(files, monkeypatch)
    writer = BackgroundWriter(files, patience_seconds=0.05, prompt_seconds=0.01)

    def write_too_many() -> None:
        for number in range(DEPTH + 2):
            writer.write_step(*step(number))

    with pytest.raises(TimeoutError, match=r"the file system took no data for 0\.05 seconds"):
        write_too_many()
    with pytest.raises(TimeoutError):
        writer.close()

    stuck.released.set()
    writer._patience = 20
    writer.close()


def test_a_step_that_was_dropped_leaves_the_recording_without_its_end(
    files: RecordingWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Stuck(files, monkeypatch)
    writer = BackgroundWriter(files, patience_seconds=0.05, prompt_seconds=0)

    def write_too_many() -> None:
        for number in range(DEPTH + 2):
            writer.write_step(*step(number))

    with pytest.raises(TimeoutError):
        write_too_many()
    stuck.released.set()
    writer._patience = 20

    with pytest.raises(OSError, match="an earlier step could not be written, and nothing is recorded behind the gap"):
        writer.write_step(*step(9))
    writer.close()

    written = [number for _, number, _, _ in content(tmp_path / "run")]
    assert written == list(range(len(written)))  # what had been taken over, and nothing behind the gap
    assert len(written) >= DEPTH
    assert open_recording(str(tmp_path / "run")).status(0).message == (
        f"rank 0: step {len(written)} could not be written: the file system took no data for 0.05 seconds; "
        "all steps before it are used."
    )


def test_a_step_whose_summaries_never_come_is_an_error_and_nothing_follows_it(
    files: RecordingWriter, tmp_path: Path
) -> None:
    class Lost(Deferred):
        def result(self) -> np.void:
            raise RuntimeError("the device is gone")

    writer = BackgroundWriter(files)
    writer.write_step(*step(0))
    observations, summaries = step(1)
    writer.write_step(observations, [Lost() for _ in summaries])
    with suppress(RuntimeError):  # whether this call is told, or closing, is a question of time
        writer.write_step(*step(2))
    with suppress(RuntimeError):
        writer.close()
    writer.close()

    assert [number for _, number, _, _ in content(tmp_path / "run")] == [0]
    assert open_recording(str(tmp_path / "run")).status(0).message == (
        "rank 0: the recording ends early: RuntimeError: the device is gone; the steps that are left are used."
    )


def test_a_step_that_cannot_be_written_is_an_error_of_a_later_call_and_nothing_follows_it(
    files: RecordingWriter, tmp_path: Path
) -> None:
    files._files.data = FullDisk(files._files.data, room=20_000)  # type: ignore[assignment]
    writer = BackgroundWriter(files)

    def write_many() -> None:
        for number in range(100):
            writer.write_step(*step(number))

    with pytest.raises(OSError, match="No space left"):
        write_many()
    with suppress(OSError):  # of a step that was waiting behind the one that failed
        writer.close()

    written = [number for _, number, _, _ in content(tmp_path / "run")]
    assert written == list(range(len(written)))
    assert 0 < len(written) < 10
    assert open_recording(str(tmp_path / "run")).status(0).ending == "truncated"
    assert not writer._thread.is_alive()
    assert files._files.data.closed


def test_an_error_of_the_last_step_is_an_error_of_closing(files: RecordingWriter) -> None:
    files._files.data = FullDisk(files._files.data, room=100)  # type: ignore[assignment]
    writer = BackgroundWriter(files)
    writer.write_step(*step(0))

    with pytest.raises(OSError, match="No space left"):
        writer.close()

    assert not writer._thread.is_alive()
    assert files._files.data.closed


def test_closing_twice_is_closing_once(files: RecordingWriter) -> None:
    writer = BackgroundWriter(files)
    writer.close()
    writer.close()

    assert files._files.data.closed


def test_closing_takes_a_limited_time_and_can_be_tried_again(
    files: RecordingWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Stuck(files, monkeypatch)
    writer = BackgroundWriter(files, patience_seconds=0.1, prompt_seconds=0.01)
    writer.write_step(*step(0))
    with pytest.raises(TimeoutError, match=r"for 0\.1 seconds at the end; the last 3 steps may be missing"):
        writer.close()

    stuck.released.set()
    writer._patience = 20
    writer.close()
    assert open_recording(str(tmp_path / "run")).status(0).ending == "closed"


def test_only_the_thread_touches_the_file_system(files: RecordingWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = BackgroundWriter(files)
    touched = []
    for name in ("write_run", "write_rank", "write_step", "close"):
        monkeypatch.setattr(files, name, lambda *_, name=name: touched.append((name, threading.current_thread())))
    writer.write_run(RUN)
    writer.write_rank({})
    writer.write_step(*step(0))
    writer.close()
    monkeypatch.undo()
    files.close()

    assert touched == [(name, writer._thread) for name in ("write_run", "write_rank", "write_step", "close")]


def test_a_file_system_that_does_not_answer_is_a_clear_error(tmp_path: Path) -> None:
    released = threading.Event()
    made: list[RecordingWriter] = []

    def slow() -> RecordingWriter:
        released.wait(30)
        made.append(RecordingWriter(str(tmp_path / "run"), run=RUN))
        return made[0]

    with pytest.raises(ConfigError, match=r"its file system did not answer for 0\.05 seconds"):
        opened_in_time(slow, "run", seconds=0.05)

    released.set()  # what comes late is closed, so that its path is free again
    until = time.monotonic() + 20
    while not (made and made[0]._files.data.closed) and time.monotonic() < until:
        time.sleep(0.01)
    assert made[0]._files.data.closed


FORKING = """
import os, sys, torch, traindiff

model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step():
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()

with traindiff.record(sys.argv[1], model, optimizer, strict=True):
    step()
    child = os.fork()
    if child == 0:
        for _ in range(10):
            step()
        sys.exit()  # closes the recorder on its way out
    assert os.waitpid(child, 0)[1] == 0
    step()
    step()
"""


def test_a_fork_of_the_process_leaves_the_recording_alone(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORKING, str(tmp_path / "run")], check=True, timeout=120)

    recording = open_recording(str(tmp_path / "run"))
    assert [part.step for part in recording.steps(0)] == [0, 1, 2]
    assert recording.status(0).ending == "closed"
