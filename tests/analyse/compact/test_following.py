"""A run is compacted while it goes on. Whenever the follower waits, the run adds something: no clock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.analyse.check.test_following import Run
from tests.analyse.compact.made_up_ranks import record_ranks, writers_of
from tests.analyse.compact.test_compacting import CHANGES
from tests.compacted import comparison_of, verdict_of
from traindiff.analyse.compact.compacting import ASKED, INCOMPLETE, compact
from traindiff.analyse.compact.pruning import prune
from traindiff.errors import ConfigError, RecordingError
from traindiff.storage import open_recording


def written(path: Path, *, steps: int = 6, stops: int | None = None, change: str = "a copy") -> Iterator[None]:
    """Write a run of 4 ranks, rank after rank in each step; one that stops at rank 1 in its last step."""
    writers = writers_of(path)
    yield
    for step in range(steps):
        for rank, (write, _) in enumerate(writers):
            if stops is None or rank != stops or step < steps - 1:
                write(step, CHANGES[change])
            yield
    for rank, (_, close) in enumerate(writers):
        if rank != stops:
            close()
        yield


def test_a_run_is_compacted_while_it_goes_on(tmp_path: Path) -> None:
    run = Run(written(tmp_path / "run"))
    seen: list[tuple[int, int]] = []
    made = compact(
        tmp_path / "run", tmp_path / "small", whole_every=4, follow=run.follower(),
        progress=lambda step: seen.append((step, run.num_waits)),
    )  # fmt: skip

    assert [step for step, _ in seen] == list(range(6))
    assert len({waits for _, waits in seen}) > 3, "steps were merged as they came"
    assert made.whole == {ASKED: 2}
    assert made.notes == ()
    compact(tmp_path / "run", tmp_path / "after", whole_every=4)
    assert verdict_of(tmp_path / "small") == verdict_of(tmp_path / "after") == verdict_of(tmp_path / "run")
    baseline = record_ranks(tmp_path / "baseline", steps=6)
    assert comparison_of(baseline, tmp_path / "small") == comparison_of(baseline, tmp_path / "run")


def test_the_step_in_which_a_rank_stopped_stays_whole(tmp_path: Path) -> None:
    run = Run(written(tmp_path / "run", stops=1))
    made = compact(tmp_path / "run", tmp_path / "small", follow=run.follower(patience_seconds=5.0))

    assert made.notes == ("Nothing was added to rank 1 for 5 seconds, so it was not followed any more.",)
    assert str(made).endswith(made.notes[0])
    assert made.whole == {INCOMPLETE: 2}, "the last step that rank 1 has, and the one that it lacks"
    assert verdict_of(tmp_path / "small") == verdict_of(tmp_path / "run")


def test_a_run_is_replaced_when_it_has_ended(tmp_path: Path) -> None:
    run = Run(written(tmp_path / "run", change="nothing"))
    made = prune(tmp_path / "run", whole_every=3, follow=run.follower())

    assert made.whole == {ASKED: 2}
    assert open_recording(str(tmp_path / "run")).is_compact
    assert verdict_of(tmp_path / "run")["verdict"] == "healthy"


def test_a_run_that_may_go_on_is_not_replaced(tmp_path: Path) -> None:
    run = Run(written(tmp_path / "run", stops=1))
    with pytest.raises(RecordingError, match=r"stays as it is, since it may go on\. Nothing was added to rank 1"):
        prune(tmp_path / "run", follow=run.follower(patience_seconds=5.0))

    assert not open_recording(str(tmp_path / "run")).is_compact
    assert [one.name for one in tmp_path.iterdir()] == ["run"]


def test_workers_do_not_follow(tmp_path: Path) -> None:
    run = Run(written(tmp_path / "run"))
    with pytest.raises(ConfigError, match="Leave it out while the run goes on"):
        compact(tmp_path / "run", tmp_path / "small", workers=2, follow=run.follower())
