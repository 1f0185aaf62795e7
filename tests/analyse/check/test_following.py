"""A run that goes on is judged as its steps arrive. Whenever the follower waits, the run adds something: no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.analyse.compact.made_up_ranks import Change, on_rank, record_ranks, writers_of
from tests.analyse.rules.test_interrupted import part
from tests.compacted import comparison_of, verdict_of
from tests.made_up import CONTENT, Step, at, observed, plain_step, record
from traindiff.analyse.check import check
from traindiff.analyse.compare import compare
from traindiff.analyse.compare.incremental import RunningComparison
from traindiff.errors import ConfigError, NotARecordingError
from traindiff.storage import Follower, RecordingWriter

FC = ("forward", "", "fc", "output[0]")
GRADIENT = ("grad", "", "fc.weight", "grad")
WHOLE_RUN = {"observe": ["batch", "forward", "backward", "grad", "optimizer", "param"]}


class Run:
    """Writes the next part of a run each time somebody waits; then time passes until patience ends."""

    def __init__(self, parts: Iterator[None]) -> None:
        self._parts = parts
        self.now = 0.0
        self.num_waits = 0

    def sleep(self, seconds: float) -> None:
        self.num_waits += 1
        if next(self._parts, "ended") == "ended":
            self.now += seconds

    def follower(self, patience_seconds: float = 30.0) -> Follower:
        return Follower(patience_seconds, sleep=self.sleep, clock=lambda: self.now)


def written(
    path: Path | str,
    edit: Callable[[int, Step], None] = lambda step, sites: None,
    *,
    steps: int = 6,
    close: bool = True,
) -> Iterator[None]:
    """Write a run: its files, each step, its end."""
    settings = {"ranks": None, "steps": None, "every": 1, "evaluation": False, **WHOLE_RUN}
    writer = RecordingWriter(str(path), run={"world_size": 1, "mesh": None, "settings": settings, "environment": {}})
    writer.write_rank(CONTENT)
    yield
    for step in range(steps):
        sites = plain_step(step)
        edit(step, sites)
        pairs = [observed(site, seen, step=step, order=order) for order, (site, seen) in enumerate(sites.items())]
        writer.write_step([one for one, _ in pairs], np.array([summary for _, summary in pairs]))
        yield
    if close:
        writer.close()
        yield


def with_nan(values: Any) -> Any:
    values[0] = np.nan
    return values


def test_a_healthy_run_is_followed_to_its_end(tmp_path: Path) -> None:
    run = Run(written(tmp_path / "run"))
    found = check(tmp_path / "run", follow=run.follower())

    assert (found.verdict, found.steps) == ("healthy", tuple(range(6)))
    assert found.to_json() == check(tmp_path / "run").to_json()


def test_it_is_not_followed_beyond_the_first_finding(tmp_path: Path) -> None:
    run = Run(written(tmp_path / "run", at(GRADIENT, with_nan, step=2), steps=1000))
    found = check(tmp_path / "run", follow=run.follower())

    assert (found.verdict, found.steps) == ("unhealthy", (0, 1, 2))
    assert (found.findings[0].step, found.findings[0].path) == (2, "fc.weight")
    assert run.num_waits < 8


def test_what_is_said_is_what_is_said_afterwards_of_the_same_steps(tmp_path: Path) -> None:
    change = at(GRADIENT, with_nan, step=2)
    record(tmp_path / "baseline", steps=6, recorded=WHOLE_RUN)
    found = compare(tmp_path / "baseline", tmp_path / "run", follow=Run(written(tmp_path / "run", change)).follower())

    whole = compare(tmp_path / "baseline", tmp_path / "run", steps="0-2")
    assert (found.verdict, found.steps) == ("diverged", (0, 1, 2))
    assert found.first_divergence == whole.first_divergence
    assert found.findings == whole.findings


def test_a_candidate_that_agrees_is_followed_to_its_end(tmp_path: Path) -> None:
    record(tmp_path / "baseline", steps=6, recorded=WHOLE_RUN)
    found = compare(tmp_path / "baseline", tmp_path / "run", follow=Run(written(tmp_path / "run")).follower())

    assert (found.verdict, found.steps) == ("identical", tuple(range(6)))
    assert found.to_json() == compare(tmp_path / "baseline", tmp_path / "run").to_json()


def test_a_run_that_adds_nothing_more_is_said_to_be_silent(tmp_path: Path) -> None:
    run = Run(written(tmp_path / "run", steps=3, close=False))
    found = check(tmp_path / "run", follow=run.follower(patience_seconds=7.0))

    assert (found.verdict, found.steps) == ("incomplete", (0, 1, 2))
    assert found.notes[0] == "Nothing was added to rank 0 for 7 seconds, so it was not followed any more."
    assert "was not closed" in found.notes[1]
    assert 7.0 <= run.now < 9.0


def test_nothing_is_waited_for_where_a_run_has_ended(tmp_path: Path) -> None:
    record(tmp_path / "run", recorded=WHOLE_RUN)
    run = Run(iter(()))
    found = check(tmp_path / "run", follow=run.follower())

    assert run.num_waits == 0
    assert found.to_json() == check(tmp_path / "run").to_json()


def test_a_run_that_has_not_begun_is_waited_for(tmp_path: Path) -> None:
    def late() -> Iterator[None]:
        yield
        yield
        yield from written(tmp_path / "run")

    assert check(tmp_path / "run", follow=Run(late()).follower()).verdict == "healthy"
    with pytest.raises(NotARecordingError):
        check(tmp_path / "never", follow=Run(iter(())).follower())


def test_a_step_that_is_half_written_is_waited_for(tmp_path: Path) -> None:
    def torn() -> Iterator[None]:
        parts = written(tmp_path / "whole")
        for _ in range(3):
            next(parts)
        (tmp_path / "run").mkdir()
        for _ in parts:
            pass
        source, target = tmp_path / "whole" / "rank-00000", tmp_path / "run" / "rank-00000"
        target.mkdir()
        (tmp_path / "run" / "run.json").write_bytes((tmp_path / "whole" / "run.json").read_bytes())
        (target / "rank.json").write_bytes((source / "rank.json").read_bytes())
        (target / "observations.crc").write_bytes((source / "observations.crc").read_bytes())
        content = (source / "observations.arrows").read_bytes()
        for end in range(0, len(content), 1000):
            (target / "observations.arrows").write_bytes(content[:end])
            yield
        (target / "observations.arrows").write_bytes(content)
        yield

    found = check(tmp_path / "run", follow=Run(torn()).follower())

    assert found.verdict == "healthy"
    assert found.steps == tuple(range(6))


def _ranks(path: Path, change: Change, *, ends: int = 1000) -> Iterator[None]:
    """Ranks that write their steps one after the other; rank 1 leaves after some steps."""
    writers = writers_of(path)
    yield
    for step in range(6):
        for rank, (write, close) in enumerate(writers):
            if rank != 1 or step < ends:
                write(step, change)
                yield
            if step == 5 and (rank != 1 or step < ends):
                close()
                yield


def test_ranks_are_followed_together(tmp_path: Path) -> None:
    change = on_rank(2, "param copy", lambda values: values * 2, begin=3)
    record_ranks(tmp_path / "afterwards", change, steps=6)
    found = check(tmp_path / "run", follow=Run(_ranks(tmp_path / "run", change)).follower())

    assert (found.verdict, found.steps) == ("unhealthy", (0, 1, 2, 3))
    assert "Rank 2 holds another copy of copy value" in found.findings[0].message
    first, before = found.findings[0].to_json(), verdict_of(tmp_path / "afterwards", steps="0-3")["findings"][0]
    assert first == before


def test_a_rank_that_is_silent_does_not_hold_up_the_others_for_ever(tmp_path: Path) -> None:
    run = Run(_ranks(tmp_path / "run", lambda step, rank, held: None, ends=3))
    found = check(tmp_path / "run", follow=run.follower())

    assert found.verdict == "incomplete"
    assert found.steps == tuple(range(6))
    assert found.notes[0].startswith("Nothing was added to rank 1 for 30 seconds")
    assert "Rank 1 did not record step 3, which others did." in found.notes


def test_a_compact_recording_is_read_as_it_is(tmp_path: Path) -> None:
    from traindiff.analyse.compact import compact

    path = record_ranks(tmp_path / "run")
    compact(path, tmp_path / "compact")
    run = Run(iter(()))

    assert check(tmp_path / "compact", follow=run.follower()).verdict == "healthy"
    assert run.num_waits == 0
    assert comparison_of(path, tmp_path / "compact", follow=run.follower())["verdict"] == "identical"


def test_an_offset_is_refused(tmp_path: Path) -> None:
    record(tmp_path / "run", recorded=WHOLE_RUN)

    with pytest.raises(ConfigError, match="Leave out the offset"):
        compare(tmp_path / "run", tmp_path / "run", follow=Follower(), offset=2)


def test_a_run_on_a_store_is_followed(tmp_path: Path) -> None:
    path = f"memory://following-{tmp_path.name}/run"
    found = check(path, follow=Run(written(path, at(GRADIENT, with_nan, step=2), steps=5)).follower())

    assert found.verdict == "unhealthy"
    assert (found.findings[0].step, found.findings[0].path) == (2, "fc.weight")


def _ranks_of_which_one_fails(path: Path) -> Iterator[None]:
    """Two ranks; an error ends rank 0 in the forward pass of step 3, and rank 1 leaves nothing of that step."""
    observe = ["batch", "forward", "grad", "param"]
    settings = {"observe": observe, "ranks": None, "steps": None, "every": 1, "detail": ["summary"]}
    run = {"world_size": 2, "mesh": None, "settings": settings, "versions": {}, "environment": {}}
    writers = [RecordingWriter(str(path), run=run, rank=rank, world_size=2) for rank in (0, 1)]
    for writer in writers:
        writer.write_rank({"model": "Model"})
    yield
    paths = ("embedding", "experts", "head", "")
    for step in range(4):
        for rank, writer in enumerate(writers[: 1 if step == 3 else 2]):
            parts = [part(one, n, rank=rank, step=step) for n, one in enumerate(paths[: 1 if step == 3 else 4])]
            if step < 3:
                parts.append(part("head.weight", 9, rank=rank, phase="param", step=step))
            writer.write_step([seen for seen, _, _ in parts], np.array([summary for _, _, summary in parts]))
            yield
    error = {"type": "RuntimeError", "message": "Connection reset by peer", "step": 3}
    writers[0].write_rank({"model": "Model", "ended": {"steps": {"optimizer": 3}, "error": error}})
    writers[0].close()
    yield


def test_how_ranks_ended_is_known_in_the_end_as_it_is_afterwards(tmp_path: Path) -> None:
    run = Run(_ranks_of_which_one_fails(tmp_path / "run"))
    found = check(tmp_path / "run", follow=run.follower())

    after = check(tmp_path / "run")
    assert [one.kind for one in after.warnings] == ["interrupted"]
    assert found.warnings == after.warnings
    assert found.rules == after.rules


def test_what_a_candidate_finds_out_later_is_known_as_it_is_afterwards(tmp_path: Path) -> None:
    later = {"reduced_in": "bfloat16", **CONTENT["parameters"]["fc.weight"]}
    content = {**CONTENT, "parameters": {**CONTENT["parameters"], "fc.weight": later}}
    record(tmp_path / "baseline", steps=6, recorded=WHOLE_RUN)
    seen: list[bool] = []

    def parts() -> Iterator[None]:
        begun = written(tmp_path / "run")
        for number, _ in enumerate(begun):
            if number == 3:
                writer = RecordingWriter(str(tmp_path / "other"), run={"world_size": 1, "settings": {}})
                writer.write_rank(content)
                writer.close()
                (tmp_path / "other" / "rank-00000" / "rank.json").replace(tmp_path / "run" / "rank-00000" / "rank.json")
            yield

    def learn(self: RunningComparison, candidate: Any) -> None:
        seen.append("reduced_in" in candidate.rank_content(0)["parameters"]["fc.weight"])
        told(self, candidate)

    told = RunningComparison.learn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunningComparison, "learn", learn)
        found = compare(tmp_path / "baseline", tmp_path / "run", follow=Run(parts()).follower())
    assert seen[0] is False
    assert seen[1:] == [True]
    assert found.verdict == "identical"
