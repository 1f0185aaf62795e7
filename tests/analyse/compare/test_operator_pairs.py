"""Operators of one call in two runs, aligned by their names."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from traindiff.analyse.compare.operator_pairs import OperatorRun, paired

TURN = ["aten.mm", "aten.add", "aten.tanh", "aten.mul"]


def operators(names: Sequence[str]) -> list[OperatorRun]:
    return [
        OperatorRun(
            rank=0, micro_step=0, phase="forward", path=f"1/{name}", module="1", call=0, name=name, order=number,
            inputs={}, outputs={},
        )
        for number, name in enumerate(names)
    ]  # fmt: skip


def shared(names: Sequence[str], others: Sequence[str]) -> tuple[int, list[str]]:
    """How many both have, and what only one of them has; nothing is lost, and the order stays."""
    runs = operators(names), operators(others)
    pairs = list(paired(*runs))
    assert [pair.baseline for pair in pairs if pair.baseline] == runs[0]
    assert [pair.candidate for pair in pairs if pair.candidate] == runs[1]
    both = [pair for pair in pairs if pair.baseline and pair.candidate]
    assert all(pair.baseline and pair.candidate and pair.baseline.name == pair.candidate.name for pair in both)
    alone = [pair.baseline or pair.candidate for pair in pairs if not (pair.baseline and pair.candidate)]
    return len(both), [f"{one.name} at {one.order}" for one in alone if one]


def test_what_one_run_has_more_in_a_loop_shifts_no_other_turn_of_it() -> None:
    assert shared(TURN * 8, [*TURN * 2, "aten.neg", *TURN * 6]) == (32, ["aten.neg at 8"])


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("others", "in_common"),
    [
        (TURN, 4),
        (["aten.mm", "aten.neg", "aten.add", "aten.tanh", "aten.mul"], 4),
        (["aten.mm", "aten.add_tanh", "aten.mul"], 2),
    ],
)
def test_loops_of_many_turns_are_aligned_in_a_moment(others: list[str], in_common: int) -> None:
    both, _ = shared(TURN * 5000, others * 5000)
    assert both == 5000 * in_common


def test_what_has_nothing_in_common_is_shown_beside_the_other() -> None:
    both, alone = shared(["aten.a", "aten.b"] * 300, ["aten.c"] * 600)
    assert (both, len(alone)) == (0, 1200)
