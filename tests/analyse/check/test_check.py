"""`traindiff.check`: one run by itself."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import traindiff
from tests.made_up import CONTENT, Array, Edit, Seen, Step, at, random, record
from traindiff.analyse.check import Verdict, check
from traindiff.analyse.findings import Finding


def on_ranks(path: Path, world_size: int, edits: Mapping[int, Edit], *, steps: int = 3) -> Path:
    """A recording of ranks that hold copies of everything, but for these edits."""
    for rank in range(world_size):
        record(path, edits.get(rank, unchanged), rank=rank, run={"world_size": world_size}, steps=steps)
    return path


def unchanged(step: int, sites: Step) -> None:
    """No edit."""


def draws(step: int, sites: Step) -> None:
    """The forward pass draws random numbers."""
    sites["batch", "after", "rng", "cpu"].values = np.full(4, step + 100, dtype=np.uint8)


def other_random_state(step: int, sites: Step) -> None:
    draws(step, sites)
    sites["batch", "before", "rng", "cpu"].values = np.full(4, step + 50, dtype=np.uint8)


def on_other_samples(edit: Edit) -> Edit:
    """What a data-parallel rank records: its random state is its own."""

    def both(step: int, sites: Step) -> None:
        edit(step, sites)
        for site, seen in sites.items():
            if site[2] == "rng":
                seen.about["term"] = 1

    return both


def test_copies_that_agree_are_healthy(tmp_path: Path) -> None:
    verdict = traindiff.check(on_ranks(tmp_path / "run", 3, {}))

    assert verdict.verdict == "healthy", str(verdict)
    assert (verdict.steps, verdict.ranks, verdict.findings, verdict.exit_code) == ((0, 1, 2), (0, 1, 2), (), 0)
    assert str(verdict) == f"healthy: no rule is broken, over 3 steps (0 to 2) on 3 ranks\n\n{verdict.rules_sentence()}"


@pytest.mark.parametrize(
    ("site", "where"),
    [
        (("param", "", "fc.weight", "value"), "fc.weight value"),
        (("grad", "", "head.weight", "grad"), "head.weight grad"),
        (("optimizer", "", "fc.bias", "momentum_buffer"), "fc.bias momentum_buffer"),
        (("optimizer", "", "optimizer.groups[0]", "lr"), "optimizer.groups[0] lr"),
    ],
)
def test_a_rank_that_is_alone_is_named(site: tuple[str, str, str, str], where: str, tmp_path: Path) -> None:
    run = on_ranks(tmp_path / "run", 3, {1: at(site, lambda values: values + 1, step=1)})

    verdict = traindiff.check(run)

    assert (verdict.verdict, verdict.exit_code) == ("unhealthy", 1)
    (finding,) = verdict.findings
    assert (finding.kind, finding.step, finding.rank, finding.phase, finding.slot) == (
        "ranks-disagree", 1, 1, site[0], site[3],
    )  # fmt: skip
    assert finding.message.startswith(f"Rank 1 holds another copy of {where} than ranks 0 and 2. ")


GRADIENT = ("grad", "", "fc.weight", "grad")


def contributed(rank: int, edit: Edit | None = None) -> Edit:
    """A rank of three whose micro-batch contributes its own share of a gradient, which all ranks then hold."""

    def both(step: int, sites: Step) -> None:
        shares = [random(8, 6, seed=100 * step + number) for number in range(3)]
        about = {"micro_step": 0, "merge": "sum", "term": rank}
        sites["grad", "micro", "fc.weight", "grad"] = Seen(values=shares[rank], about=about)
        sites[GRADIENT].values = (shares[0] + shares[1] + shares[2]) / np.float32(3)
        if edit:
            edit(step, sites)

    return both


def not_reduced(rank: int) -> Edit:
    return lambda step, sites: sites[GRADIENT].__setattr__("values", random(8, 6, seed=100 * step + rank))


@pytest.mark.parametrize(
    ("edits", "reason"),
    [
        ({1: at(GRADIENT, lambda values: values * 0)}, "What rank 1 holds is all zero."),
        ({1: at(GRADIENT, lambda values: values * 3)}, "What rank 1 holds is 3 x what rank 0 holds."),
        ({1: not_reduced(1)}, "What rank 1 holds is its own contribution alone: not reduced?"),
        (
            {0: not_reduced(0), 1: not_reduced(1), 2: not_reduced(2)},
            "What ranks 0 and 1 hold is their own contribution alone: not reduced?",
        ),
        ({1: at(GRADIENT, lambda values: values + random(8, 6, seed=9))}, "They differ by "),
    ],
)
def test_the_way_in_which_a_copy_differs_is_named(edits: dict[int, Edit], reason: str, tmp_path: Path) -> None:
    run = on_ranks(tmp_path / "run", 3, {rank: contributed(rank, edits.get(rank)) for rank in range(3)})

    first = traindiff.check(run).findings[0]
    assert (first.kind, first.path) == ("ranks-disagree", "fc.weight")
    assert reason in first.message


@pytest.mark.parametrize(
    ("site", "reason"),
    [
        (("param", "", "fc.weight", "value"), "is the copy of the step before: the step's update did not reach it."),
        (GRADIENT, "is the copy of the step before: one step late."),
    ],
)
def test_a_copy_of_the_step_before_is_recognized(site: tuple[str, str, str, str], reason: str, tmp_path: Path) -> None:
    held: list[Array] = []

    def late(step: int, sites: Step) -> None:
        held.append(sites[site].values)
        if step == 2:
            sites[site].values = held[1]

    finding = traindiff.check(on_ranks(tmp_path / "run", 3, {1: late})).findings[0]
    assert (finding.step, finding.rank, finding.path) == (2, 1, "fc.weight")
    assert finding.message.endswith(f"What rank 1 holds {reason}")


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_copy_that_alone_changes_is_not_taken_for_the_right_one(world_size: int, tmp_path: Path) -> None:
    site = ("param", "", "fc.weight", "value")

    def frozen(_step: int, sites: Step) -> None:
        sites[site].values = random(8, 6, seed=5)
        del sites[GRADIENT]

    def corrupted(step: int, sites: Step) -> None:
        frozen(step, sites)
        if step == 2:
            sites[site].values = sites[site].values + np.float32(1)

    edits = {**dict.fromkeys(range(world_size), frozen), 1: corrupted}
    finding = traindiff.check(on_ranks(tmp_path / "run", world_size, edits)).findings[0]

    assert (finding.step, finding.path) == (2, "fc.weight")
    assert "step before" not in finding.message


def test_without_contributions_gradients_that_all_differ_are_asked_about(tmp_path: Path) -> None:
    edits = {rank: not_reduced(rank) for rank in range(3)}

    assert (
        traindiff.check(on_ranks(tmp_path / "run", 3, edits))
        .findings[0]
        .message.endswith("No two ranks hold the same: was it never reduced?")
    )


def test_a_number_that_differs_is_given_for_both_ranks(tmp_path: Path) -> None:
    site = ("optimizer", "", "optimizer.groups[0]", "lr")
    run = on_ranks(tmp_path / "run", 3, {1: at(site, lambda values: values + 1, step=1)})

    assert traindiff.check(run).findings[0].message.endswith(" It is 0.1 on rank 0 and 1.1 on rank 1.")


def test_ranks_that_were_given_other_samples_are_not_said_to_have_the_same(tmp_path: Path) -> None:
    def both(step: int, sites: Step) -> None:
        other_random_state(step, sites)
        sites["batch", "", "", "input[0]"].values = random(5, 6, seed=77 + step)

    verdict = traindiff.check(on_ranks(tmp_path / "run", 3, {0: draws, 1: draws, 2: both}))

    assert "same samples" not in str(verdict)


def test_what_is_wrong_in_several_steps_is_one_finding(tmp_path: Path) -> None:
    site = ("param", "", "fc.weight", "value")

    verdict = traindiff.check(on_ranks(tmp_path / "run", 2, {1: at(site, lambda values: values + 1)}))

    (finding,) = verdict.findings
    assert (finding.step, finding.evidence["num_steps"]) == (0, 3)
    assert finding.rank is None  # of two, which is wrong is not known


def test_ranks_with_the_same_samples_draw_the_same_random_numbers(tmp_path: Path) -> None:
    verdict = traindiff.check(on_ranks(tmp_path / "run", 3, {0: draws, 1: draws, 2: other_random_state}))

    first = verdict.findings[0]
    assert (first.kind, first.step, first.rank, first.phase, first.path) == ("ranks-disagree", 0, 2, "batch", "rng")
    assert "Rank 2 holds another random state" in first.message
    assert "dropout" in first.message


def test_random_state_that_nothing_is_drawn_from_may_differ(tmp_path: Path) -> None:
    other = at(("batch", "before", "rng", "cpu"), lambda values: values + 9)

    def same_after(step: int, sites: Step) -> None:
        other(step, sites)
        sites["batch", "after", "rng", "cpu"] = Seen(values=sites["batch", "before", "rng", "cpu"].values)

    assert traindiff.check(on_ranks(tmp_path / "run", 2, {1: same_after})).verdict == "healthy"


def test_ranks_with_other_samples_draw_other_random_numbers(tmp_path: Path) -> None:
    run = on_ranks(tmp_path / "run", 2, {0: draws, 1: on_other_samples(other_random_state)})

    assert traindiff.check(run).verdict == "healthy"


def test_statistics_in_buffers_are_each_ranks_own(tmp_path: Path) -> None:
    def statistics(mean: float) -> Edit:
        def edit(_step: int, sites: Step) -> None:
            sites["param", "", "norm.running_mean", "buffer"] = Seen(values=np.full(8, mean, dtype=np.float32))

        return edit

    run = on_ranks(tmp_path / "run", 2, {0: statistics(0.5), 1: statistics(0.25)})

    assert traindiff.check(run).verdict == "healthy"


def test_a_rank_that_is_missing_leaves_the_verdict_open(tmp_path: Path) -> None:
    record(tmp_path / "run", run={"world_size": 2})

    verdict = traindiff.check(tmp_path / "run")

    assert (verdict.verdict, verdict.exit_code) == ("incomplete", 3)
    assert verdict.notes == ("Rank 1 left no recording, so its copies are not checked.",)


def test_a_rank_that_ends_earlier_is_named(tmp_path: Path) -> None:
    for rank, steps in enumerate((3, 2)):
        record(tmp_path / "run", rank=rank, run={"world_size": 2}, steps=steps)

    verdict = traindiff.check(tmp_path / "run")

    assert verdict.verdict == "incomplete"
    assert verdict.notes == ("Rank 1 did not record step 2, which others did.",)


def test_a_rank_that_begins_later_than_others_keeps_the_order_of_steps(tmp_path: Path) -> None:
    for rank, steps in enumerate((range(1, 3), range(3))):
        record(tmp_path / "run", rank=rank, run={"world_size": 2}, steps=steps)

    verdict = traindiff.check(tmp_path / "run")

    assert verdict.steps == (0, 1, 2)
    assert verdict.notes == ("Rank 0 did not record step 0, which others did.",)


def test_a_rank_that_was_not_to_be_recorded_is_said_to_be_left_out(tmp_path: Path) -> None:
    record(tmp_path / "run", run={"world_size": 2}, recorded={"ranks": [0]})

    verdict = traindiff.check(tmp_path / "run")

    assert verdict.verdict == "incomplete"
    assert verdict.notes == ("The run was asked not to record rank 1, so copies there are not checked.",)


def test_without_a_finished_step_nothing_is_said_to_be_healthy(tmp_path: Path) -> None:
    record(tmp_path / "run")

    verdict = traindiff.check(tmp_path / "run", steps="7")

    assert verdict.verdict == "incomplete"
    assert str(verdict).startswith("incomplete: nothing could be checked")


def test_steps_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    record(tmp_path / "run")

    with pytest.raises(traindiff.ConfigError, match="nothing was checked"):
        traindiff.check(tmp_path / "run", steps="2-1-")


def test_ranks_that_are_missing_by_the_hundred_thousand_take_a_moment(tmp_path: Path) -> None:
    many = 1 << 17
    run = record(tmp_path / "run", run={"world_size": many}, content={**CONTENT, "world_size": many}, steps=30)
    begun = time.monotonic()

    verdict = traindiff.check(run)

    assert time.monotonic() - begun < 10  # each of them was looked for among all others: many minutes
    assert "and 131063 more left no recordings" in verdict.notes[0]


def verdict_of(*, warnings: int = 0, steps: int = 3, ranks: int = 1) -> Verdict:
    found = tuple(
        Finding(step=0, phase="forward", path=f"fc{number}", slot="x", order=0, kind=f"kind-{number}", message="Look.")
        for number in range(warnings)
    )
    return Verdict(
        recording="run", verdict="healthy", findings=(), warnings=found, steps=tuple(range(steps)),
        ranks=tuple(range(ranks)), notes=(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("about", "end"),
    [
        ({}, "over 3 steps (0 to 2)"),
        ({"steps": 1}, "over step 0"),
        ({"ranks": 2}, "over 3 steps (0 to 2) on 2 ranks"),
        ({"warnings": 1}, "over 3 steps (0 to 2); 1 warning"),
        ({"warnings": 2}, "over 3 steps (0 to 2); 2 warnings"),
        ({"steps": 0}, "nothing could be checked"),
    ],
)
def test_a_verdict_counts_steps_ranks_and_warnings(about: dict[str, int], end: str) -> None:
    assert verdict_of(**about).sentence().endswith(end)


@pytest.mark.parametrize(("times", "said"), [((1, 1), False), ((2, 1), True), ((1, 2), True)])
def test_that_only_the_last_evaluation_is_judged_is_said_where_any_step_has_several(
    times: tuple[int, int], said: bool, tmp_path: Path
) -> None:
    def evaluations(step: int) -> Step:
        number = times[step]
        moved: Step = {("param", "", "fc.weight", "value"): Seen(values=random(4, 3, seed=9))}
        return moved | {
            ("forward", "", f"fc{one}", "output[0]"): Seen(values=random(4, 3, seed=one), about={"evaluation": one})
            for one in range(number)
        }

    verdict = check(str(record(tmp_path / "run", steps=2, build=evaluations)))

    assert any(note.startswith("Some steps evaluate the loss several times") for note in verdict.notes) == said
