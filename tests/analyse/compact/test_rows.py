"""Rows of merged steps that a stranger wrote: what cannot be is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.analyse.compact.made_up_ranks import on_rank, record_ranks
from traindiff.analyse.check import check
from traindiff.analyse.compact import compact
from traindiff.analyse.merge.placed_parts import RankPart
from traindiff.analyse.merge.rank_codes import codes_of, differing_rank, num_bits
from traindiff.core.shards import Shard
from traindiff.core.summary import empty
from traindiff.errors import CorruptRecordingError
from traindiff.storage import RecordingWriter, manifest, open_recording
from traindiff.storage.merged_rows import ENTRY, MICRO_STEP, PART, RANKS, groups_in, groups_text, listed, numbers_in
from traindiff.storage.schema import Malformed


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40))
def test_numbers_are_read_as_they_were_written(numbers: list[int]) -> None:
    assert numbers_in(listed(numbers), 51, len(numbers)) == numbers


@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=8), max_size=8))
def test_groups_are_read_as_they_were_written(groups: list[list[int]]) -> None:
    total = sum(map(len, groups))
    assert groups_in(groups_text(groups), 51, total) == tuple(map(tuple, groups))


@pytest.mark.parametrize(
    "text", ["", "a", "-1", "2-1", "0-99", "0-999999999", "1,,2", "0,1,2,3,4", "0-4", "\u0661", "1" * 30, "0|1"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(Malformed):
        numbers_in(text, 10, 4)


def sketches(world_size: int, seed: int) -> list[Any]:
    found = empty(world_size)
    found["sketch"] = np.random.default_rng(seed).standard_normal((world_size, 64))
    return list(found)


def parts(summaries: list[Any]) -> list[RankPart]:
    return [RankPart(0, rank, Shard.whole((4,)), one, rank) for rank, one in enumerate(summaries)]


@given(st.integers(2, 300), st.data())
def test_one_rank_that_differs_is_found_and_several_are_not_taken_for_one(world_size: int, data: st.DataObject) -> None:
    differing = data.draw(st.sets(st.integers(0, world_size - 1), min_size=1, max_size=min(4, world_size)))
    baseline, candidate = sketches(world_size, 0), sketches(world_size, 0)
    for rank in differing:
        candidate[rank]["sketch"] += np.random.default_rng(rank).standard_normal(64)
    bits = num_bits(world_size)
    change = sum(one["sketch"] for one in candidate) - sum(one["sketch"] for one in baseline)
    codes = codes_of(parts(candidate), bits) - codes_of(parts(baseline), bits)

    found = differing_rank(change, codes, clear=0.05)

    assert found == (next(iter(differing)) if len(differing) == 1 else None)


def _rewritten(path: Path, change: Any) -> None:
    """Write the merged steps of a compact recording again, with valid seals and other rows."""
    steps = list(open_recording(str(path)).merged_steps())
    for file in (path / "merged").iterdir():
        file.unlink()
    writer = RecordingWriter(str(path), run={}, directory="merged")
    for step in steps:
        rows = list(step.observations)
        change(rows)
        writer.write_step(rows, step.summaries)
    writer.close()


def _row(kind: int, **about: Any) -> Any:
    """Changes the first row of a kind."""

    def change(rows: list[Any]) -> None:
        at = next(at for at, row in enumerate(rows) if row.evaluation == kind)
        rows[at] = rows[at]._replace(**about)

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_row(PART, slot="99"), "does not list"),
        (_row(PART, slot="0-3,0-3,0-3"), "does not list"),
        (_row(PART, order=10_000), "belongs to no site"),
        (_row(RANKS, slot="0|7"), "does not list"),
        (_row(RANKS, slot="0-3|0-3"), "does not list"),
        (_row(ENTRY, term=4000), "are missing"),
        (_row(PART, evaluation=9), "is of no kind"),
        (_row(ENTRY, evaluation=MICRO_STEP, order=5), "belongs to no site"),
    ],
)
def test_rows_that_cannot_be_are_refused(change: Any, says: str, tmp_path: Path) -> None:
    compact(record_ranks(tmp_path / "run", on_rank(3, "param copy", lambda values: values * 2)), tmp_path / "compact")
    _rewritten(tmp_path / "compact", change)

    with pytest.raises(CorruptRecordingError, match=says):
        check(tmp_path / "compact")


def test_places_of_ranks_that_are_not_there_are_refused(tmp_path: Path) -> None:
    compact(record_ranks(tmp_path / "run"), tmp_path / "compact")
    run = tmp_path / "compact" / "run.json"
    content = manifest.load_run(run.read_bytes(), where="run.json")
    run.write_bytes(manifest.dump({**content, "world_size": 3}))
    for rank in (tmp_path / "compact").glob("rank-*/rank.json"):
        rank.write_bytes(manifest.dump({"rank": int(rank.parent.name[5:])}))

    with pytest.raises(CorruptRecordingError, match="a rank that the run does not have"):
        check(tmp_path / "compact")


@pytest.mark.parametrize("missing", ["merged", "places"])
def test_a_compact_recording_without_one_of_its_streams_is_no_healthy_one(missing: str, tmp_path: Path) -> None:
    compact(record_ranks(tmp_path / "run"), tmp_path / "compact")
    for file in (tmp_path / "compact" / missing).iterdir():
        file.unlink()

    if missing == "merged":
        assert check(tmp_path / "compact").verdict == "incomplete"
    else:
        with pytest.raises(CorruptRecordingError, match="places 0 are missing"):
            check(tmp_path / "compact")
