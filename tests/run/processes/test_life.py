"""A slow machine is not a hang: how much time ranks had is counted, and not how much has passed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from traindiff.run.processes.launch import RankProcesses
from traindiff.run.processes.life import Clock, Pulse, pulse
from traindiff.run.processes.rank_end import Patience, RankEnd
from traindiff.run.processes.rank_process import Here, Launched, place_of

NEEDS_PROC = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system has no /proc")


def clock_after(pulses: Iterator[Pulse | None], *, every: float = 1.0) -> Clock:
    """A clock that has looked at each pulse in turn."""
    clock = Clock()
    for number, found in enumerate(pulses):
        clock.look(number * every, found)
    return clock


def test_a_process_that_does_nothing_is_quiet_for_all_the_time() -> None:
    clock = clock_after(Pulse(cpu_seconds=5.0) for _ in range(101))

    assert (clock.quiet, clock.had) == (100.0, 100.0)


def test_a_process_that_is_given_no_processor_is_not_quiet_however_long_it_takes() -> None:
    clock = clock_after(Pulse(cpu_seconds=5.0, wants_cpu=True) for _ in range(100_000))

    assert (clock.quiet, clock.had) == (0.0, 0.0)


def test_a_process_on_a_machine_a_hundred_times_too_slow_is_quiet_for_a_tenth_of_what_it_computed() -> None:
    clock = clock_after(Pulse(cpu_seconds=0.01 * second, wants_cpu=True) for second in range(1001))

    assert clock.quiet == pytest.approx(1.0)
    assert clock.had == pytest.approx(10.0)


def test_a_process_that_computes_without_end_is_found_ten_times_later_than_one_that_sleeps() -> None:
    clock = clock_after(Pulse(cpu_seconds=16.0 * second) for second in range(101))  # 16 threads

    assert clock.quiet == pytest.approx(10.0)


def test_threads_that_only_poll_are_no_life() -> None:
    clock = clock_after(Pulse(cpu_seconds=0.01 * second) for second in range(101))

    assert clock.waited == 100.0


def test_a_process_that_waits_for_a_disk_counts_as_one_that_computes() -> None:
    clock = clock_after(Pulse(cpu_seconds=0.0, wants_disk=True) for _ in range(101))

    assert clock.quiet == pytest.approx(10.0)


def test_the_time_in_which_the_watcher_itself_was_stopped_does_not_count() -> None:
    clock = clock_after((Pulse(cpu_seconds=0.0) for _ in range(2)), every=86400.0)

    assert clock.quiet == 5.0


def test_observations_are_a_sign_of_life_where_the_processor_is_idle() -> None:
    clock = Clock()
    for second in range(101):
        clock.look(second, None, progressed=True)

    assert clock.quiet == 0.0


def test_progress_ends_the_quiet_time_and_not_the_time_that_it_had() -> None:
    clock = clock_after(Pulse(cpu_seconds=0.0) for _ in range(11))
    clock.progress()

    assert (clock.quiet, clock.had) == (0.0, 10.0)


BUSY = "while True: pass"
PARENT_OF_BUSY = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY!r}])"


@pytest.fixture
def started() -> Iterator[Callable[[str], int]]:
    """Start Python code in a process group of its own, which the test ends."""
    running: list[subprocess.Popen[bytes]] = []

    def start(code: str) -> int:
        running.append(subprocess.Popen([sys.executable, "-c", code], start_new_session=True))
        return running[-1].pid

    yield start
    for one in running:
        os.killpg(one.pid, signal.SIGKILL)
        one.wait()


def wait_until(holds: Callable[[Pulse], bool], pid: int) -> None:
    deadline = time.monotonic() + 120
    while not ((found := pulse(pid)) and holds(found)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@NEEDS_PROC
@pytest.mark.parametrize("code", [BUSY, PARENT_OF_BUSY])
def test_what_a_process_or_its_child_computes_is_seen_until_it_is_stopped(
    code: str, started: Callable[[str], int]
) -> None:
    pid = started(code)

    wait_until(lambda found: found.wants_cpu and found.cpu_seconds > 0.5, pid)
    os.killpg(pid, signal.SIGSTOP)
    wait_until(lambda found: not found.wants_cpu, pid)
    one, other = pulse(pid), pulse(pid)

    assert one is not None
    assert one == other


@NEEDS_PROC
def test_a_process_that_sleeps_wants_no_processor_and_one_that_has_ended_has_no_pulse(
    started: Callable[[str], int],
) -> None:
    pid = started("import time; time.sleep(1000)")
    wait_until(lambda found: not found.wants_cpu, pid)

    os.killpg(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    found = pulse(pid)
    assert found is None or not found.wants_cpu


def until_released(here: Here, directory: str) -> str:
    while not (Path(directory) / "release").exists():
        time.sleep(0.01)
    return f"rank {here.rank} came to its end"


def one_after_another(here: Here, directory: str) -> str:
    result = until_released(here, directory)
    while here.rank == 1 and not (Path(directory) / "a rank has ended").exists():
        time.sleep(0.01)
    return result


class SlowMachine:
    """A quarter of an hour passes at each look at a clock. The pulses of the ranks are made up: rank 0 has the one that
    was found and rank 1 has none, and after 60 looks, when the ranks are released, both have the one that was found."""

    def __init__(self, directory: Path, found: Pulse | None, function: Launched = until_released) -> None:
        self.directory = directory
        self.found = found
        self.function = function
        self.seconds = 0.0
        self.looks = 0
        self.looked_at = 0

    def now(self) -> float:
        self.seconds += 900.0
        return self.seconds

    def pulse_of(self, pid: int) -> Pulse | None:
        self.looks += 1
        if self.looks == 60:
            (self.directory / "release").touch()
        if pid == self.looked_at:  # twice in a row, so the other rank is not looked at any more
            (self.directory / "a rank has ended").touch()
        self.looked_at = pid
        return self.found if self.looks % 2 or self.looks > 60 else None

    def ends(self) -> list[RankEnd]:
        places = [
            place_of(
                rank, 2, local_rank=rank, store=None, master=None, outputs=self.directory, scratch=self.directory,
                threads=1,
            )
            for rank in range(2)
        ]  # fmt: skip
        args = (str(self.directory),)
        with RankProcesses(
            places, self.function, args, patience=Patience(seconds=60.0), pulse_of=self.pulse_of, now=self.now
        ) as processes:
            return processes.ends()


def test_ranks_wait_for_one_that_is_given_no_processor_and_all_return(tmp_path: Path) -> None:
    ends = SlowMachine(tmp_path, Pulse(cpu_seconds=1.0, wants_cpu=True)).ends()

    assert [end.result for end in ends] == ["rank 0 came to its end", "rank 1 came to its end"]


def test_a_rank_that_has_waited_long_for_another_is_given_time_to_end_after_it(tmp_path: Path) -> None:
    ends = SlowMachine(tmp_path, Pulse(cpu_seconds=1.0, wants_cpu=True), one_after_another).ends()

    assert [end.result for end in ends] == ["rank 0 came to its end", "rank 1 came to its end"]


def test_ranks_of_which_none_does_anything_hang(tmp_path: Path) -> None:
    ends = SlowMachine(tmp_path, Pulse(cpu_seconds=1.0)).ends()

    assert [end.how for end in ends] == ["hung", "hung"]
    assert "in until_released" in ends[1].stack
    assert ends[1].message.startswith("did not end step 0 in ")
