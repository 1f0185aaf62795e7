"""Compact recordings say of each step what the ranks had recorded, and which rank differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from tests.analyse.compact.made_up_ranks import Change, on_rank, record_ranks
from tests.compacted import assert_the_same_is_said, comparison_of, verdict_of
from tests.made_up import Step, record
from traindiff.analyse.compact.compacting import ASKED, INCOMPLETE, NOT_CALLED, Compacted, compact
from traindiff.analyse.compact.pruning import prune
from traindiff.analyse.compare import compare
from traindiff.errors import ConfigError, CorruptRecordingError, RecordingError
from traindiff.present.data.exports import scalars
from traindiff.present.data.observations import Filter, rows
from traindiff.present.page import page_of
from traindiff.present.viewer.looking import look
from traindiff.storage import RecordingWriter, open_recording


def times_two(values: Any) -> Any:
    return values * 2


def with_nan(values: Any) -> Any:
    values.reshape(-1)[0] = np.nan
    return values


FORWARD = "forward hidden,loss term"
"""Activations, and the loss that follows from them: without it, they would be another representation of the same."""

CHANGES: dict[str, Change] = {
    "nothing": lambda step, rank, held: None,
    "a batch": on_rank(2, "batch input[0]", lambda values: values + 1, begin=1),
    "activations of one rank": on_rank(2, FORWARD, times_two, begin=1),
    "activations of rank 0": on_rank(0, FORWARD, times_two, begin=1),
    "activations of all ranks": lambda step, rank, held: held.update(
        {name: held[name] * np.float32(2) for name in FORWARD.split(",")}
    ),
    "NaN on one rank": on_rank(3, FORWARD, with_nan, begin=2),
    "NaN everywhere on one rank": lambda step, rank, held: (
        [held.update({name: with_nan(held[name])}) for name in held if rank == 1 and name.endswith("returned")] and None
    ),
    "a loss": on_rank(1, "loss term", times_two, begin=1),
    "a copy": on_rank(3, "param copy", times_two, begin=1),
    "a copy of a gradient": on_rank(1, "grad copy", np.zeros_like, begin=2),
    "a shard": on_rank(2, "grad shard", times_two, begin=1),
    "a learning rate": on_rank(1, "optimizer lr", times_two, begin=1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_same_is_said_of_the_compact_forms(name: str, tmp_path: Path) -> None:
    baseline, candidate = record_ranks(tmp_path / "baseline"), record_ranks(tmp_path / "candidate", CHANGES[name])

    assert_the_same_is_said(baseline, candidate, tmp_path)
    assert compact(candidate, tmp_path / "again").whole == {}


def test_one_rank_of_many_is_named_and_several_are_not(tmp_path: Path) -> None:
    one = on_rank(5, FORWARD, times_two, begin=1)
    two = on_rank(6, FORWARD, times_two, begin=1)

    def both(step: int, rank: int, held: Any) -> None:
        one(step, rank, held)
        two(step, rank, held)

    found = []
    for number, change in enumerate((one, both)):
        paths = [
            record_ranks(tmp_path / f"{number}-{name}", edit, world_size=8)
            for name, edit in (("baseline", CHANGES["nothing"]), ("candidate", change))
        ]
        compact_ones = [tmp_path / f"{path.name}-compact" for path in paths]
        for path, target in zip(paths, compact_ones, strict=True):
            compact(path, target)
        found.append([compare(*sides).first_divergence for sides in (paths, compact_ones)])

    assert [first and (first.step, first.path, first.rank) for first in found[0]] == [(1, "hidden", 5)] * 2
    whole, merged = found[1]
    assert whole is not None
    assert merged is not None
    assert (whole.step, whole.path) == (merged.step, merged.path)
    assert "ranks 5 and 6" in whole.message
    assert "rank" not in merged.message


def test_a_compact_recording_is_smaller(tmp_path: Path) -> None:
    made = compact(record_ranks(tmp_path / "run", world_size=16, steps=20), tmp_path / "compact")

    assert made.bytes_after < 0.4 * made.bytes_before
    assert (made.ranks, made.steps, made.whole) == (16, 20, {})


def test_every_nth_step_stays_as_the_ranks_recorded_it(tmp_path: Path) -> None:
    path = record_ranks(tmp_path / "run", steps=7)
    made = compact(path, tmp_path / "compact", whole_every=3)

    run, whole = open_recording(str(tmp_path / "compact")), open_recording(str(path))
    assert made.whole == {ASKED: 3}
    assert [step.step for step in run.merged_steps()] == list(range(7))
    for rank in run.ranks:
        kept = {step.step: step for step in whole.steps(rank)}
        found = list(run.steps(rank))
        assert [step.step for step in found] == [0, 3, 6]
        assert all(one.observations == kept[one.step].observations for one in found)
        assert all((one.summaries == kept[one.step].summaries).all() for one in found)
    assert_the_same_is_said(path, path, tmp_path)
    assert verdict_of(tmp_path / "compact") == verdict_of(path)


def test_a_compact_recording_can_be_compacted_again(tmp_path: Path) -> None:
    path = record_ranks(tmp_path / "run", CHANGES["activations of one rank"], steps=7)
    compact(path, tmp_path / "some", whole_every=2)
    compact(tmp_path / "some", tmp_path / "fewer", whole_every=4)
    compact(path, tmp_path / "direct", whole_every=4)

    baseline = record_ranks(tmp_path / "baseline", steps=7)
    assert comparison_of(baseline, tmp_path / "fewer") == comparison_of(baseline, tmp_path / "direct")
    assert [step.step for step in open_recording(str(tmp_path / "fewer")).steps(0)] == [0, 4]


def test_steps_that_are_chosen_are_found(tmp_path: Path) -> None:
    path = record_ranks(tmp_path / "run", steps=6)
    change = record_ranks(tmp_path / "changed", CHANGES["activations of one rank"], steps=6)
    compact(path, tmp_path / "compact", whole_every=4)
    compact(change, tmp_path / "changed-compact", whole_every=3)

    for steps in ("3", "4-5", "0-1,5", "5"):
        expected = comparison_of(path, change, steps=steps)
        assert comparison_of(tmp_path / "compact", tmp_path / "changed-compact", steps=steps) == expected


def test_ranks_that_end_early_are_named_as_before(tmp_path: Path) -> None:
    path = record_ranks(
        tmp_path / "run", steps=6, close=lambda rank: rank != 2, last=lambda rank: 4 if rank == 2 else 9
    )
    made = compact(path, tmp_path / "compact")

    assert made.whole == {INCOMPLETE: 3}  # the last step of rank 2, and what follows it
    assert verdict_of(tmp_path / "compact") == verdict_of(path)
    assert any("Rank 2 did not record step 4" in note for note in verdict_of(path)["notes"])


def test_a_recording_of_one_rank_is_compacted_too(tmp_path: Path) -> None:
    path = record(tmp_path / "run")
    compact(path, tmp_path / "compact")

    assert verdict_of(tmp_path / "compact") == verdict_of(path)
    assert compare(path, tmp_path / "compact").verdict == "identical"


def test_a_step_that_the_run_did_not_finish_is_told_apart_from_ranks_that_end(tmp_path: Path) -> None:
    def unfinished(step: int, sites: Step) -> None:
        for site in [site for site in sites if step == 3 and site[0] in ("grad", "optimizer", "param")]:
            del sites[site]

    path = record(tmp_path / "run", unfinished, steps=4)
    made = compact(path, tmp_path / "compact")

    assert made.whole == {NOT_CALLED: 1}
    assert verdict_of(tmp_path / "compact") == verdict_of(path)


def test_nothing_is_written_where_something_is(tmp_path: Path) -> None:
    path = record_ranks(tmp_path / "run")
    (tmp_path / "there").mkdir()

    with pytest.raises(ConfigError, match="is there already"):
        compact(path, tmp_path / "there")
    with pytest.raises(ConfigError, match="at least 1"):
        compact(path, tmp_path / "compact", whole_every=0)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["run", "there"]


def test_what_holds_more_than_summaries_is_refused(tmp_path: Path) -> None:
    path = record(tmp_path / "run", recorded={"detail": ["summary", "signs"]})

    with pytest.raises(ConfigError, match="holds more than summaries \\(signs\\)"):
        compact(path, tmp_path / "compact")


def test_a_damaged_recording_leaves_nothing_behind(tmp_path: Path) -> None:
    path = record_ranks(tmp_path / "run")
    data = path / "rank-00001" / "observations.arrows"
    content = bytearray(data.read_bytes())
    content[-200] ^= 1
    data.write_bytes(content)

    with pytest.raises(CorruptRecordingError):
        compact(path, tmp_path / "compact")
    assert [one.name for one in tmp_path.iterdir()] == ["run"]


def test_a_compact_recording_that_was_cut_off_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    compact(record_ranks(tmp_path / "run"), tmp_path / "compact")
    data = tmp_path / "compact" / "merged" / "observations.arrows"
    data.write_bytes(data.read_bytes()[:-1000])

    found = verdict_of(tmp_path / "compact")
    assert found["verdict"] == "incomplete"
    assert "rank 0: the recording was not compacted to its end, so steps are missing." in found["notes"][0]


def test_a_compact_recording_is_replaced_by_a_new_one(tmp_path: Path) -> None:
    compact(record_ranks(tmp_path / "run"), tmp_path / "compact")
    about = {"world_size": 1, "settings": {"observe": []}}
    with pytest.raises(ConfigError, match="already holds a recording"):
        RecordingWriter(str(tmp_path / "compact"), run=about)
    RecordingWriter(str(tmp_path / "compact"), run=about, overwrite=True).close()

    assert sorted(one.name for one in (tmp_path / "compact").iterdir()) == ["rank-00000", "run.json"]


def test_nothing_is_left_where_there_is_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = record_ranks(tmp_path / "run")
    write = RecordingWriter.write_step

    def full(self: RecordingWriter, observations: Any, summaries: Any, **how: Any) -> Any:
        if observations[0].step == 3:
            raise OSError(28, "step 3 could not be written: No space left on device")
        return write(self, observations, summaries, **how)

    monkeypatch.setattr(RecordingWriter, "write_step", full)
    with pytest.raises(RecordingError, match=r"small was not made: step 3 could not be written: No space") as told:
        compact(path, tmp_path / "small")
    assert "record(" not in str(told.value)
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordingError, match=r"small was not made: .*Not a directory"):
        compact(path, tmp_path / "file" / "small")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "run"]


def test_a_recording_on_a_store_is_compacted_here(tmp_path: Path) -> None:
    path = record_ranks(tmp_path / "run")
    store = fsspec.filesystem("memory")
    store.put(str(path), "/scale/run", recursive=True)
    try:
        made = compact("memory://scale/run", tmp_path / "compact")
        with pytest.raises(ConfigError, match="is no path on this machine"):
            compact("memory://scale/run", "memory://scale/compact")
        with pytest.raises(ConfigError, match="nothing was removed"):
            prune("memory://scale/run")
        store.put(str(tmp_path / "compact"), "/scale/compact", recursive=True)
        assert comparison_of(path, "memory://scale/compact")["verdict"] == "identical"
    finally:
        store.rm("/scale", recursive=True)

    assert made.bytes_before is None
    assert "are now" not in str(made)
    assert verdict_of(tmp_path / "compact") == verdict_of(path)


@pytest.fixture
def both_forms(tmp_path: Path) -> tuple[Path, Path]:
    path = record_ranks(tmp_path / "run", CHANGES["a copy"], steps=5)
    compact(path, tmp_path / "compact", whole_every=3)
    return path, tmp_path / "compact"


def test_the_list_of_runs_shows_the_same(both_forms: tuple[Path, Path]) -> None:
    whole, merged = (look(str(path), size_bytes=10_000) for path in both_forms)

    assert (merged.model, merged.last_step, merged.name) == (whole.model, whole.last_step, whole.name)
    assert merged.losses == whole.losses
    assert len(whole.losses) == 5


def test_scalars_are_exported_in_the_same_way(both_forms: tuple[Path, Path]) -> None:
    whole, merged = (list(scalars(open_recording(str(path)), Filter())) for path in both_forms)

    assert merged == whole
    assert len(whole) == 5


def test_a_row_is_shown_for_each_site_of_a_merged_step(both_forms: tuple[Path, Path]) -> None:
    run = open_recording(str(both_forms[1]))
    found = [row for row in rows(run, Filter(site="copy", phases=("param",))) if row["slot"] == "value"]

    assert [(row["step"], row["rank"]) for row in found] == [
        *((0, rank) for rank in range(4)), (1, None), (2, None), *((3, rank) for rank in range(4)), (4, None),
    ]  # fmt: skip


def test_a_page_of_the_compact_form_has_the_same_findings(both_forms: tuple[Path, Path], tmp_path: Path) -> None:
    baseline = record_ranks(tmp_path / "baseline", steps=5)
    pages = [page_of(compare(baseline, path, history=True)) for path in both_forms]

    assert pages[1].findings == pages[0].findings
    assert len(pages[0].findings) > 0


def test_without_steps_there_is_no_rate() -> None:
    made = Compacted(recording="run", output="small", ranks=2, steps=0, whole={}, bytes_before=11000, bytes_after=11000)

    assert str(made) == "small: 0 steps of 2 ranks; 11 kB are now 11 kB."
