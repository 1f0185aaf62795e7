"""Steps of two runs, brought together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.made_up import CONTENT, FC, GROUPS, Seen, Step, observed, record, same
from traindiff.analyse.align.side import step_pairs
from traindiff.analyse.compare import compare
from traindiff.analyse.merge.run_steps import RunStep, run_steps
from traindiff.core.site import PHASES
from traindiff.storage import RecordingWriter, open_recording


def steps_of(*numbers: int, optimizer: str = "optimizer") -> list[RunStep]:
    return [RunStep(optimizer=optimizer, step=number, table={}) for number in numbers]


def pairs(baseline: list[RunStep], candidate: list[RunStep]) -> set[tuple[str, int, bool, bool]]:
    found = list(step_pairs(iter(baseline), iter(candidate)))
    named = {
        (one.optimizer, one.step, left is not None, right is not None)
        for left, right in found
        if (one := left or right)
    }
    assert len(named) == len(found)
    return named


def test_equal_steps_are_paired() -> None:
    assert pairs(steps_of(0, 1), steps_of(0, 1)) == {("optimizer", 0, True, True), ("optimizer", 1, True, True)}


def test_a_longer_run_keeps_its_rest() -> None:
    assert pairs(steps_of(0), steps_of(0, 1)) == {("optimizer", 0, True, True), ("optimizer", 1, False, True)}
    assert pairs(steps_of(0, 1), steps_of(0)) == {("optimizer", 0, True, True), ("optimizer", 1, True, False)}


def test_runs_recorded_at_different_intervals_share_the_common_steps() -> None:
    both = {step for _, step, left, right in pairs(steps_of(0, 2, 4, 6), steps_of(0, 3, 6)) if left and right}

    assert both == {0, 6}


def test_a_run_that_starts_later_is_paired_from_there() -> None:
    assert ("optimizer", 5, True, True) in pairs(steps_of(*range(8)), steps_of(5, 6, 7))


def test_an_empty_run_pairs_nothing() -> None:
    assert pairs([], steps_of(0)) == {("optimizer", 0, False, True)}
    assert pairs([], []) == set()


def test_optimizers_are_counted_apart() -> None:
    generator, critic = steps_of(0, 1, optimizer="generator"), steps_of(0, 1, 2, 3, optimizer="critic")
    order = [critic[0], critic[1], generator[0], critic[2], critic[3], generator[1]]
    other = [critic[0], generator[0], critic[1], critic[2], generator[1], critic[3]]

    assert all(left and right for _, _, left, right in pairs(order, other))


def test_an_interval_in_one_recording_compares_every_step_that_both_have(tmp_path: Path) -> None:
    candidate = record(tmp_path / "c", steps=range(0, 5, 2), recorded={"every": 2})
    comparison = compare(record(tmp_path / "b", steps=6), candidate)

    assert comparison.steps == (0, 2, 4)
    assert comparison.verdict == "identical"


def test_selected_steps_only_are_compared(tmp_path: Path) -> None:
    def wrong(step: int, sites: Step) -> None:
        if step == 1:
            sites["forward", "", "fc", "output[0]"].values = np.ones((5, 8), np.float32)

    baseline, candidate = record(tmp_path / "b", steps=5), record(tmp_path / "c", wrong, steps=5)

    assert compare(baseline, candidate, steps="2-").verdict == "identical"
    assert compare(baseline, candidate, steps=[1]).verdict == "diverged"
    assert compare(baseline, candidate, steps="0,3").steps == (0, 3)


def test_updates_are_derived_across_steps_that_were_not_selected(tmp_path: Path) -> None:
    comparison = compare(record(tmp_path / "b"), record(tmp_path / "c"), steps="2")

    assert {row.path for row in comparison.differences if row.phase == "update"} == {
        "fc.weight",
        "fc.bias",
        "head.weight",
    }


def test_an_unfinished_step_at_the_end_is_no_missing_step(tmp_path: Path) -> None:
    def unfinished(step: int, sites: Step) -> None:
        if step == 3:
            for site in [site for site in sites if site[0] in ("grad", "optimizer", "param", "backward")]:
                del sites[site]

    comparison = compare(record(tmp_path / "b", steps=3), record(tmp_path / "c", unfinished, steps=4))

    assert comparison.verdict == "identical"


@pytest.mark.parametrize(("found_in", "steps"), [(None, (0, 1, 2)), (3, (0, 1, 2, 3))])
def test_a_step_that_neither_run_finished_counts_only_if_something_differs_in_it(
    found_in: int | None, steps: tuple[int, ...], tmp_path: Path
) -> None:
    def unfinished(step: int, sites: Step) -> None:
        if step == 3:
            for site in [site for site in sites if site[0] in ("grad", "optimizer", "param", "backward")]:
                del sites[site]

    def other(step: int, sites: Step) -> None:
        unfinished(step, sites)
        if step == found_in:
            sites["forward", "", "fc", "output[0]"].values *= -1

    comparison = compare(record(tmp_path / "b", unfinished, steps=4), record(tmp_path / "c", other, steps=4))

    assert comparison.verdict == ("identical" if found_in is None else "diverged")
    assert comparison.steps == steps


def test_a_run_that_ends_in_the_middle_of_a_step_is_not_blamed_for_the_rest_of_it(tmp_path: Path) -> None:
    def interrupted(step: int, sites: Step) -> None:
        if step == 2:
            for site in [site for site in sites if site[0] in ("grad", "optimizer", "param", "backward")]:
                del sites[site]

    for number, names in enumerate(("bc", "cb")):
        runs = {
            "b": record(tmp_path / f"b{number}"),
            "c": record(tmp_path / f"c{number}", interrupted),
        }
        comparison = compare(*(runs[name] for name in names))

        assert (comparison.verdict, comparison.findings, comparison.steps) == ("incomplete", (), (0, 1))
        assert f"The {'candidate' if names == 'bc' else 'baseline'} ends after step 1" in comparison.notes[0]


def test_runs_that_are_asked_for_activations_only_are_compared_to_their_ends(tmp_path: Path) -> None:
    def forward_only(_step: int, sites: Step) -> None:
        for site in [site for site in sites if site[0] != "forward"]:
            del sites[site]

    baseline = record(tmp_path / "b")
    candidate = record(tmp_path / "c", forward_only, recorded={"observe": ["forward"]})

    assert compare(baseline, candidate).steps == (0, 1, 2)


def test_ranks_of_one_step_are_merged(tmp_path: Path) -> None:
    about = {"world_size": 2, "mesh": None, "settings": {"observe": ["param"], "ranks": None}}
    for rank in range(2):
        writer = RecordingWriter(str(tmp_path / "run"), run=about, rank=rank, world_size=2)
        for step in range(2):
            seen, summary = observed(
                ("param", "", "w", "value"), Seen(values=np.ones(3, np.float32)), step=step, order=0
            )
            writer.write_step([seen], np.array([summary]))
        writer.close()

    steps = list(run_steps(open_recording(str(tmp_path / "run"))))

    assert [(step.step, len(step.table)) for step in steps] == [(0, 1), (1, 1)]
    assert all(step.finished for step in steps)


def test_optimizers_of_other_names_are_the_reason_that_is_given(tmp_path: Path) -> None:
    def renamed(_step: int, sites: Step) -> None:
        for seen in sites.values():
            seen.about["optimizer"] = "main"

    content = {**CONTENT, "optimizers": [{"name": "main", "type": "SGD", "groups": GROUPS}]}
    comparison = compare(record(tmp_path / "b"), record(tmp_path / "c", renamed, content=content))

    assert comparison.verdict == "incomplete"
    assert comparison.notes[0].startswith(
        "The optimizers have other names: optimizer in the baseline, main in the candidate."
    )


@pytest.mark.parametrize(
    ("observe", "lacking", "finished"),
    [
        (PHASES, {0}, [False, True]),
        (PHASES, {1}, [True, False]),
        (("forward", "grad"), {1}, [True, False]),
        (("forward", "grad"), {0}, [True, True]),  # there may be no gradients at all
        (("forward",), {0, 1}, [True, True]),
    ],
)
def test_a_step_is_finished_where_the_optimizer_was_called_or_nothing_would_show_it(
    observe: Sequence[str], lacking: set[int], finished: list[bool], tmp_path: Path
) -> None:
    def edit(step: int, sites: Step) -> None:
        for site in [site for site in sites if site[0] not in observe or (step in lacking and site[0] != "forward")]:
            del sites[site]

    path = record(tmp_path / "run", edit, steps=2, recorded={"observe": list(observe)})

    assert [step.finished for step in run_steps(open_recording(str(path)))] == finished


def test_the_ranks_that_lack_a_step_are_those_of_that_step(tmp_path: Path) -> None:
    """The ranks take turns, so that each lacks what the other has."""
    for rank, steps in enumerate((range(0, 3, 2), range(1, 4, 2))):
        record(tmp_path / "run", steps=steps, run={"world_size": 2}, rank=rank)

    found = {step.step: step.missing for step in run_steps(open_recording(str(tmp_path / "run")))}

    assert found == {0: (1,), 1: (0,), 2: (1,), 3: (0,)}


def test_a_rank_that_joins_later_is_not_taken_for_one_that_says_the_same(tmp_path: Path) -> None:
    def of_another_output(_step: int, sites: Step) -> None:
        renamed = {(*site[:3], "output[1]") if site == FC else site: seen for site, seen in sites.items()}
        sites.clear()
        sites.update(renamed)

    about = {"world_size": 2, "mesh": {"data_parallel": 1}}
    for name, edit in (("b", same), ("c", of_another_output)):
        record(tmp_path / name, run=about, steps=5)
        record(tmp_path / name, edit, run=about, steps=range(2, 5), rank=1)

    comparison = compare(tmp_path / "b", tmp_path / "c")

    assert comparison.verdict == "incomplete"
    assert [one.slot for one in comparison.unaligned[1]] == ["output[1]"]
