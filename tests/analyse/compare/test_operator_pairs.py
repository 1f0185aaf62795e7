"""Operators of one call in two runs, aligned by their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.analyse.merge.test_step_table import only, part
from traindiff.analyse.compare.operator_pairs import OperatorRun, paired
from traindiff.analyse.compare.operator_search import StepOperators, localize
from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.site import MergedSite

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


def test_what_both_end_with_is_paired_once() -> None:
    assert shared(["a", "x", "t"], ["a", "t", "y", "t"]) == (2, ["x at 1", "t at 1", "y at 2"])
    assert shared(["t"], ["t", "t"]) == (1, ["t at 1"])
    assert shared([], ["t"]) == (0, ["t at 0"])


LONG = [f"aten.{number}" for number in range(600)]


@pytest.mark.parametrize(("more", "in_common"), [(1, 600), (32, 600), (33, 300)])
def test_in_long_calls_up_to_32_operators_of_one_run_are_skipped(more: int, in_common: int) -> None:
    """Both begin and end with something else, so that the rest is not simply a common end."""
    others = [*LONG[:300], *(f"own.{number}" for number in range(more)), *LONG[300:]]

    both, alone = shared(["first", *LONG, "last"], ["other", *others, "end"])

    assert both == in_common
    assert len(alone) == 4 + more + 2 * (600 - in_common)


def test_in_long_calls_a_single_name_that_is_the_same_is_no_place_to_go_on() -> None:
    """Two in a row must agree; `aten.neg` alone does so by chance."""
    names = ["first", *LONG[:300], "aten.abs", "aten.neg", *LONG[300:], "last"]
    others = ["other", *LONG[:300], "aten.neg", "aten.exp", *LONG[300:], "end"]

    both, _ = shared(names, others)

    assert both == 600


def operator(order: int, made: float = 1.0, *, given: float = 1.0, unobserved: str = "", **slots: float) -> OperatorRun:
    def seen(slot: str, value: float, why: str = "") -> MergedSite:
        values = np.full(8, value, dtype=np.float32)
        return only([part(values, site=("forward", "operator", f"fc/{order}", slot), unobserved=why)])

    return OperatorRun(
        rank=0, micro_step=0, phase="forward", path=f"fc/{order}", module="fc", call=0, name=f"aten.{order}",
        order=order, inputs={"input[0]": seen("input[0]", given)},
        outputs={
            "output[0]": seen("output[0]", made, unobserved),
            **{slot: seen(slot, value) for slot, value in slots.items()},
        },
    )  # fmt: skip


def located(baseline: Sequence[OperatorRun], candidate: Sequence[OperatorRun], **about: Any) -> Any:
    finding = Finding(**{
        "step": 0, "phase": "forward", "path": "fc", "slot": "output[0]", "order": 5, "kind": "value", "message": "",
        "difference": 0.5, "floor": 1e-6, **about,
    })  # fmt: skip
    key = (0, 0, "backward" if finding.phase == "grad" else "forward", "fc", 0)
    given = StepOperators(calls=({key: baseline}, {key: candidate}), noise=(), described=({}, {}))
    return localize(finding, given)


def test_the_first_operator_that_makes_something_else_of_equal_inputs_is_named() -> None:
    found = located([operator(1), operator(2), operator(3)], [operator(1), operator(2, 2.0), operator(3, 2.0)])

    assert found is not None
    assert (found.cause, found.operator, found.operator_slot) == ("operator", "fc/2", "output[0]")
    assert found.num_operators == 3


def test_only_operators_before_the_finding_explain_it() -> None:
    """The site is observed at 5; what runs at the same place or later is given it."""
    before = located([operator(4), operator(5)], [operator(4), operator(5, 2.0)])
    gradient = located([operator(4), operator(6)], [operator(4), operator(6, 2.0)], phase="grad", path="fc.weight")

    assert (before.cause, before.num_operators) == ("none", 1)
    assert gradient.cause == "operator"  # comes after all of its operators, whatever their place


@pytest.mark.parametrize("sides", [("", "lost"), ("lost", ""), ("lost", "lost")])
def test_what_one_run_did_not_observe_of_an_operator_is_not_compared(sides: tuple[str, str]) -> None:
    baseline, candidate = (operator(1, 2.0 * number, unobserved=why) for number, why in enumerate(sides, 1))

    assert located([baseline], [candidate]).cause == "none"


def test_an_output_that_only_one_run_has_is_not_compared() -> None:
    assert located([operator(1, more=1.0)], [operator(1, other=2.0)]).cause == "none"
