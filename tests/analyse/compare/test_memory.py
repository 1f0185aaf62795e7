"""One step of each run is in memory at a time: what a comparison holds does not grow with the number of steps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.made_up import FC, record, scaled
from traindiff.analyse.compare import compare
from traindiff.storage import StepObservations, open_recording, stream


def test_a_step_is_let_go_of_before_the_next_is_unpacked(tmp_path: Path) -> None:
    steps = open_recording(str(record(tmp_path / "run"))).steps(0)
    seen = next(steps)
    summaries = weakref.ref(seen.summaries)

    del seen

    assert summaries() is None


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many steps of ranks are in memory, each time that one is unpacked."""
    held: list[Any] = []
    counts: list[int] = []
    unpack = stream.unpacked

    def unpacked(*args: Any, **kwargs: Any) -> StepObservations:
        step = unpack(*args, **kwargs)
        held.append(weakref.ref(step.summaries))
        gc.collect()
        counts.append(sum(one() is not None for one in held))
        return step

    monkeypatch.setattr(stream, "unpacked", unpacked)
    gc.freeze()  # what other tests have left is not walked through again and again
    yield counts
    gc.unfreeze()


def test_what_a_comparison_holds_does_not_grow_with_the_number_of_steps(tmp_path: Path, unpacked: list[int]) -> None:
    for rank in range(2):
        record(tmp_path / "candidate", rank=rank, run={"world_size": 2}, steps=8)

    assert compare(record(tmp_path / "baseline", steps=8), tmp_path / "candidate").verdict == "identical"

    assert len(unpacked) == 2 * 8  # rank 0 of both runs is in the same bytes
    # Of the step before, and of the first one, what was observed on one rank only may be needed further on.
    assert max(unpacked) == max(unpacked[:8]) <= 2 + 2 * 2


def test_what_is_judged_is_in_no_cycle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in a cycle stays in memory until Python looks for cycles, which it does rarely while runs are compared."""
    paths = record(tmp_path / "baseline", steps=8), record(tmp_path / "candidate", scaled(FC, 1e-7), steps=8)
    held: list[Any] = []
    unpack = stream.unpacked

    def unpacked(*args: Any, **kwargs: Any) -> StepObservations:
        held.append(weakref.ref((step := unpack(*args, **kwargs)).summaries))
        return step

    monkeypatch.setattr(stream, "unpacked", unpacked)
    gc.collect()
    gc.disable()
    try:
        found = compare(*paths)
        left = sum(one() is not None for one in held)
    finally:
        gc.enable()

    assert found.verdict == "equivalent"
    assert len(held) == 2 * 8
    assert left <= 2  # what the comparison shows of the steps that matter
