"""A path that is being recorded is refused, with `overwrite` too, until the recording ends or its process does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.storage.samples import RUN, read, step, write
from traindiff.errors import ConfigError
from traindiff.storage import RecordingWriter

ROOT = Path(__file__).parents[2]

RECORDING = """
import sys, os
from tests.storage.samples import RUN, step
from traindiff.storage import RecordingWriter

writer = RecordingWriter(sys.argv[1], run=RUN)
writer.write_step(*step(0))
if len(sys.argv) > 2 and os.fork() == 0:
    print("forked", os.getpid(), flush=True)
    sys.stdin.read()
    os._exit(0)
if len(sys.argv) == 2:
    print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-c", RECORDING, *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield process, process.stdout.readline()
        finally:
            process.kill()


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_recording_of_this_process_is_refused_and_goes_on(overwrite: bool, tmp_path: Path) -> None:
    writer = write(tmp_path / "run", steps=1, close=False)

    with pytest.raises(ConfigError) as caught:
        write(tmp_path / "run", overwrite=overwrite)

    assert str(caught.value) == (
        "1 problem in record(...); nothing was attached to the model.\n"
        "\n"
        f"  record(path='{tmp_path}/run')\n"
        "    is being recorded at the moment (rank-00000), by this process or by another one.\n"
        "    Give another path, or end that recording first: call its close(), or end its process."
    )
    writer.write_step(*step(1))
    writer.close()
    assert [one.step for one in read(tmp_path / "run")] == [0, 1]
    write(tmp_path / "run", steps=1, overwrite=True)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_recording_of_another_process_is_refused_until_that_is_killed(overwrite: bool, tmp_path: Path) -> None:
    with another_process(str(tmp_path / "run")) as (process, said):
        assert said == "ready\n"
        with pytest.raises(ConfigError, match="is being recorded at the moment"):
            write(tmp_path / "run", overwrite=overwrite)
        assert len(read(tmp_path / "run")) == 1  # readers are not hindered
        process.kill()
        process.wait()

    write(tmp_path / "run", steps=2, overwrite=True)
    assert len(read(tmp_path / "run")) == 2


def test_a_fork_that_outlives_a_killed_recording_does_not_keep_its_path(tmp_path: Path) -> None:
    """As the workers of a data loader do."""
    with another_process(str(tmp_path / "run"), "fork") as (process, said):
        worker = int(said.split()[1])
        process.kill()
        process.wait()
        try:
            os.kill(worker, 0)  # it is there
            write(tmp_path / "run", steps=2, overwrite=True)
        finally:
            os.kill(worker, signal.SIGKILL)

    assert len(read(tmp_path / "run")) == 2


def test_a_rank_beyond_those_of_a_new_run_is_not_removed_while_it_is_recorded(tmp_path: Path) -> None:
    live = RecordingWriter(str(tmp_path / "run"), run={**RUN, "world_size": 4}, rank=3, world_size=4)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}

    with pytest.raises(ConfigError, match=r"is being recorded at the moment \(rank-00003\)"):
        write(tmp_path / "run", overwrite=True)

    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    live.close()


def test_where_there_are_no_locks_recording_works_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(_fd: int, _kind: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", no_locks)
    first = write(tmp_path / "run", steps=2, close=False)
    second = write(tmp_path / "run", steps=1, overwrite=True, close=False)

    with pytest.raises(Exception, match="moved, deleted or replaced"):  # it is not lost without a word
        first.write_step(*step(2))
    first.close()
    second.write_step(*step(1))
    second.close()
    assert [one.step for one in read(tmp_path / "run")] == [0, 1]


def test_a_recording_that_could_not_begin_keeps_no_lock_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("traindiff.storage.written_files.WrittenFiles.append", full)
    with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
        write(tmp_path / "deep" / "run")
    monkeypatch.undo()

    assert list(tmp_path.iterdir()) == []
    write(tmp_path / "deep" / "run")


def test_a_system_without_these_locks_records_and_reads(tmp_path: Path) -> None:
    source = (
        "import sys; sys.modules['fcntl'] = None\n"
        "from tests.storage.samples import read, write\n"
        "write(sys.argv[1]); assert len(read(sys.argv[1])) == 3\n"
    )

    subprocess.run([sys.executable, "-c", source, str(tmp_path / "run")], check=True)
