"""Runs that are read in blocks of steps, by other processes, have the verdict that one process gives."""

from __future__ import annotations

import filecmp
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.analyse.compact.made_up_ranks import record_ranks
from tests.analyse.compact.test_compacting import CHANGES, FORWARD, on_rank, times_two
from tests.compacted import without_paths
from tests.in_blocks import in_blocks
from tests.made_up import record
from traindiff.analyse.blocks import steps
from traindiff.analyse.blocks.pool import Pool
from traindiff.analyse.blocks.tasks import tasks_of
from traindiff.analyse.check import check
from traindiff.analyse.compact.compacting import compact
from traindiff.analyse.compare import compare
from traindiff.analyse.merge.run_steps import MergedAlone, RunStep, StepMerger
from traindiff.errors import ConfigError, CorruptRecordingError, WorkerError
from traindiff.storage import Follower, open_recording


def said(result: Any) -> tuple[str, Any]:
    return str(result), result.to_json()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CHANGES)
def test_the_same_is_said_wherever_runs_are_cut(name: str, seed: int, tmp_path: Path) -> None:
    baseline = record_ranks(tmp_path / "baseline", steps=7)
    candidate = record_ranks(tmp_path / "candidate", CHANGES[name], steps=7)
    with in_blocks(seed) as tasks:
        found = [
            said(compare(baseline, candidate, history=True, workers=2)),
            said(compare(baseline, candidate, steps="2-5", workers=2)),
            said(check(candidate, workers=2)),
        ]

    assert tasks.num_calls >= 3
    assert found == [
        said(compare(baseline, candidate, history=True)),
        said(compare(baseline, candidate, steps="2-5")),
        said(check(candidate)),
    ]


@pytest.mark.parametrize("seed", range(4))
def test_the_compact_form_has_the_same_bytes(seed: int, tmp_path: Path) -> None:
    path = record_ranks(tmp_path / "run", CHANGES["a copy"], steps=7, last=lambda rank: 6 if rank == 2 else 7)
    made = compact(path, tmp_path / "one", whole_every=3)
    with in_blocks(seed) as tasks:
        again = compact(path, tmp_path / "blocks", whole_every=3, workers=2)

    assert tasks.num_calls
    assert again.whole == made.whole
    names = sorted(str(file.relative_to(tmp_path / "one")) for file in (tmp_path / "one").rglob("*") if file.is_file())
    streams = [name for name in names if "observations" in name]
    assert streams
    assert filecmp.cmpfiles(tmp_path / "one", tmp_path / "blocks", streams, shallow=False)[1:] == ([], [])
    assert said(check(tmp_path / "blocks"))[1]["notes"] == without_paths(said(check(tmp_path / "one"))[1]["notes"])


@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_end_early_and_a_candidate_that_continues(seed: int, tmp_path: Path) -> None:
    baseline = record_ranks(tmp_path / "baseline", steps=7)
    cut = record_ranks(
        tmp_path / "cut", steps=7, close=lambda rank: rank != 1, last=lambda rank: 5 if rank == 1 else 1 << 30
    )
    with in_blocks(seed):
        found = [
            said(compare(baseline, cut, workers=2)),
            said(check(cut, workers=2)),
            said(compare(baseline, cut, offset=2, workers=2)),
        ]

    assert found == [said(compare(baseline, cut)), said(check(cut)), said(compare(baseline, cut, offset=2))]


def test_one_compact_run_is_read_here_and_the_other_one_in_blocks(tmp_path: Path) -> None:
    baseline = record_ranks(tmp_path / "baseline", steps=5)
    candidate = record_ranks(tmp_path / "candidate", CHANGES["a shard"], steps=5)
    compact(baseline, tmp_path / "small")
    with in_blocks(1) as tasks:
        found = said(compare(tmp_path / "small", candidate, workers=2))

    assert tasks.num_calls
    assert found == said(compare(tmp_path / "small", candidate))
    assert not steps.is_divided(open_recording(str(tmp_path / "small")))


@pytest.mark.parametrize("workers", [None, 2])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("shorter", [range(2), range(18, 20)], ids=["ends early", "begins late"])
def test_no_steps_pile_up_where_a_run_has_more_of_them(
    shorter: range, swapped: bool, workers: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = record(tmp_path / "long", steps=20), record(tmp_path / "short", steps=shorter)
    live: set[int] = set()
    most: list[int] = []
    made, release = StepMerger.step, RunStep.release

    def noted(self: StepMerger, merged: MergedAlone) -> RunStep:
        step = made(self, merged)
        live.add(id(step.table))
        most.append(len(live))
        return step

    def released(self: RunStep) -> None:
        release(self)
        live.remove(id(self.table))

    monkeypatch.setattr(StepMerger, "step", noted)
    monkeypatch.setattr(RunStep, "release", released)
    with in_blocks(0):
        compare(*(runs[::-1] if swapped else runs), offset=0, workers=workers)

    assert len(most) == 22
    assert max(most) <= 2


def test_damage_is_told_with_the_same_words(tmp_path: Path) -> None:
    baseline, candidate = record_ranks(tmp_path / "baseline", steps=6), record_ranks(tmp_path / "candidate", steps=6)
    stream = candidate / "rank-00002" / "observations.arrows"
    content = bytearray(stream.read_bytes())
    content[-5000] ^= 1
    stream.write_bytes(content)
    with pytest.raises(CorruptRecordingError) as expected:
        compare(baseline, candidate)

    with in_blocks(2), pytest.raises(CorruptRecordingError) as found:
        compare(baseline, candidate, workers=2)
    assert str(found.value) == str(expected.value)


def test_processes_read_what_one_process_reads(tmp_path: Path) -> None:
    baseline = record_ranks(tmp_path / "baseline", steps=12)
    candidate = record_ranks(tmp_path / "candidate", on_rank(2, FORWARD, times_two, begin=9), steps=12)
    seen: list[int] = []

    found = compare(baseline, candidate, workers=2, progress=seen.append)

    assert seen == list(range(12))
    assert said(found) == said(compare(baseline, candidate))
    assert found.first_divergence is not None
    assert (found.first_divergence.step, found.first_divergence.rank) == (9, 2)


def test_no_more_is_read_ahead_than_workers_and_one() -> None:
    asked: list[int] = []

    def calls() -> Iterator[tuple[int]]:
        for number in range(20):
            asked.append(number)
            yield (number,)

    with Pool(2) as pool:
        results = pool.ordered(abs, calls(), task_bytes=1)
        for number in range(20):
            assert next(results) == number
            assert len(asked) <= number + 3


def dies_at_first(number: int, directory: str) -> int:
    """The number; but when it is first asked for 3, its process is killed."""
    mark = Path(directory) / "died"
    if number == 3 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def dies(number: int) -> int:
    """Nothing: its process is killed."""
    os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills a process")
def test_a_call_whose_worker_is_killed_is_made_again(tmp_path: Path) -> None:
    with Pool(2) as pool:
        calls = ((number, str(tmp_path)) for number in range(8))
        assert list(pool.ordered(dies_at_first, calls, task_bytes=1)) == list(range(8))
    assert (tmp_path / "died").exists()


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="kills a process")
def test_workers_that_die_again_and_again_are_told() -> None:
    with Pool(1) as pool, pytest.raises(WorkerError, match=r"died 3 times .* use fewer workers"):
        list(pool.ordered(dies, [(1,)], task_bytes=1))


@pytest.mark.parametrize("workers", [0, -1, "many", "0", "1.5", True])
def test_what_is_no_number_of_workers_is_refused(workers: Any) -> None:
    with pytest.raises(ConfigError, match='Write a number of processes, at least 1, or "ray"'):
        tasks_of(workers)


def test_a_run_that_is_followed_is_read_by_one_process(tmp_path: Path) -> None:
    path = record(tmp_path / "run")
    for ask in (
        lambda: check(path, follow=Follower(0.1), workers=2),
        lambda: compare(path, path, follow=Follower(0.1), workers=2),
    ):
        with pytest.raises(ConfigError, match="a run that is followed has them one by one"):
            ask()


def test_blocks_hold_all_steps_and_no_more_than_fit(tmp_path: Path) -> None:
    run = open_recording(str(record_ranks(tmp_path / "run", steps=50)))
    spans, task_bytes = steps.blocks([run], steps.WHOLE_RUN, 2)

    assert [one.begin for one in spans] == [0, *(one.end + 1 for one in spans[:-1] if one.end is not None)]
    assert spans[-1].end is None
    assert len(spans) >= 8
    assert task_bytes >= 50 / len(spans) * run.step_bytes(0) * 4
