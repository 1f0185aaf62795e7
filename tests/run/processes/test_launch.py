"""Functions in fresh processes: what comes back, how each rank ended, and that none is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from traindiff.core.observation import Observation
from traindiff.core.shards import Shard
from traindiff.run.processes.launch import launch
from traindiff.run.processes.rank_end import Patience, RanksError
from traindiff.run.processes.rank_process import Here


def seen(path: str) -> Observation:
    return Observation(
        step=2, micro_step=0, optimizer="optimizer", phase="forward", stage="", path=path, slot="output[0]", call=0,
        order=0, dtype="float32", shard=Shard.whole(()),
    )  # fmt: skip


def greeting(here: Here, word: str) -> dict[str, Any]:
    sys.stdout.write(f"{word} from {here.rank}\n")
    os.system(f"echo and from a program of {here.rank}")
    for number in range(3):
        here.step_done(number)
    return {"environment": [os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")], "pid": os.getpid()}


def failing_on_one(here: Here, how: str) -> None:
    here.last_seen(seen("embed"))
    if here.rank == 1:
        here.last_seen(seen("layers.0"))
        sys.stdout.write("this is the end\n")
        ENDS[how]()
    distributed.barrier()


def refuse() -> None:
    raise ValueError("rank one has had enough")


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    os._exit(7)


def sleep_here() -> None:
    time.sleep(100)


ENDS = {"raises": refuse, "is killed": kill_itself, "leaves": leave, "hangs": sleep_here}


def failed(how: str, outputs: Path) -> RanksError:
    with pytest.raises(RanksError) as caught:
        launch(failing_on_one, how, world_size=2, outputs=outputs, threads=1, patience=Patience(seconds=3))
    return caught.value


def test_each_rank_knows_its_place_and_what_it_returns_and_prints_is_kept(tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []

    ends = launch(
        greeting, "hello", world_size=2, outputs=tmp_path, threads=1, on_step=lambda *step: heard.append(step)
    )

    assert [end.result["environment"] for end in ends] == [["0", "0", "2"], ["1", "1", "2"]]
    assert sorted(heard) == [(rank, number) for rank in range(2) for number in range(3)]
    assert (tmp_path / "rank-1.txt").read_text() == "hello from 1\nand from a program of 1\n"
    assert [end.num_steps for end in ends] == [3, 3]


def test_a_rank_without_a_group_has_no_environment_of_one(tmp_path: Path) -> None:
    (end,) = launch(greeting, "hello", world_size=1, grouped=False, outputs=tmp_path, threads=1)

    assert end.result["environment"] == [None, None, None]
    assert end.result["pid"] != os.getpid()


def test_a_rank_that_raises_is_told_apart_from_the_one_that_waits_for_it(tmp_path: Path) -> None:
    error = failed("raises", tmp_path)

    assert (error.first.rank, error.first.how) == (1, "raised")
    assert error.first.sentence == "Rank 1 raised ValueError: rank one has had enough"
    assert error.first.last_observation == "step 2, micro-step 0, forward, layers.0 output[0]"
    assert 'raise ValueError("rank one has had enough")' in error.first.stack
    assert error.first.output == "this is the end"
    assert error.first.output_file == str(tmp_path / "rank-1.txt")


def test_a_rank_that_is_killed_still_says_what_it_saw_last(tmp_path: Path) -> None:
    error = failed("is killed", tmp_path)

    assert (error.first.rank, error.first.how) == (1, "died")
    assert error.first.message == "was ended by signal 9, SIGKILL (was there enough memory?)."
    assert error.first.last_observation == "step 2, micro-step 0, forward, layers.0 output[0]"


def test_a_rank_that_leaves_without_a_word_is_not_taken_for_one_that_returned(tmp_path: Path) -> None:
    assert failed("leaves", tmp_path).first.message == "ended with exit code 7, without an exception."


def test_of_ranks_that_hang_the_one_that_waits_for_no_other_comes_first_with_its_stack(tmp_path: Path) -> None:
    error = failed("hangs", tmp_path)

    assert [end.how for end in error.ends] == ["hung", "hung"]
    assert error.first.rank == 1
    assert re.fullmatch(r"did not end step 0 in \d+ seconds( \(computing for \d+ of them\))?\.", error.first.message)
    assert "in sleep_here" in error.first.stack
    assert error.ends[0].message.endswith(", waiting for other ranks.")


LAUNCHER = """
from pathlib import Path
from tests.run.processes.test_launch import sleeping
from traindiff.run.processes.launch import launch

if __name__ == "__main__":
    launch(sleeping, {directory!r}, world_size=2, outputs=Path({directory!r}), threads=1)
"""


def sleeping(here: Here, directory: str) -> None:
    (Path(directory) / f"pid-{here.rank}").write_text(str(os.getpid()))
    time.sleep(100)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_one_that_launched_it(how: signal.Signals, tmp_path: Path) -> None:
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER.format(directory=str(tmp_path)))
    path = os.pathsep.join([str(Path(__file__).parents[3]), *sys.path])
    launcher = subprocess.Popen(
        [sys.executable, str(script)], env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.DEVNULL
    )
    files = [tmp_path / f"pid-{rank}" for rank in range(2)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files))

    launcher.send_signal(how)

    assert launcher.wait(30) != 0
    wait_until(lambda: not any(is_running(int(file.read_text())) for file in files))


def wait_until(holds: Any) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_patience_grows_with_the_slowest_step_unless_it_is_given() -> None:
    assert Patience().limit(None) == 600
    assert Patience().limit(1.0) == 60
    assert Patience().limit(30.0) == 300
    assert Patience(seconds=5).limit(None) == Patience(seconds=5).limit(100.0) == 5
