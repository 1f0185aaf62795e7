"""Sets of steps as users write them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traindiff.core.steps import ALL_STEPS, StepSelection, parse_steps
from traindiff.errors import Problem


def chosen(value: Any, among: int = 40) -> list[int]:
    selection = parse_steps(value, where="steps")
    assert isinstance(selection, StepSelection), selection
    return [step for step in range(among) if step in selection]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("3", [3]),
        (3, [3]),
        (0, [0]),
        ("0-3", [0, 1, 2, 3]),
        ("0-2,5,38-", [0, 1, 2, 5, 38, 39]),
        (" 1 - 2 , 4 ", [1, 2, 4]),
        ("4,2,2-3", [2, 3, 4]),
        ([7, 1, 7], [1, 7]),
        (range(2, 5), [2, 3, 4]),
        ({9, 8}, [8, 9]),
        ((number for number in (1, 2)), [1, 2]),
        (None, list(range(40))),
    ],
)
def test_steps_are_read_as_they_are_written(value: Any, expected: list[int]) -> None:
    assert chosen(value) == expected


@given(st.sets(st.integers(0, 60), min_size=1))
def test_any_set_of_steps_survives_being_written_out(steps: set[int]) -> None:
    selection = parse_steps(steps, where="steps")
    assert isinstance(selection, StepSelection)

    assert chosen(selection.text, among=61) == sorted(steps)


def test_all_steps_are_written_as_nothing() -> None:
    assert parse_steps(None, where="steps") is ALL_STEPS
    assert ALL_STEPS.text == ""
    assert 10**12 in ALL_STEPS


def test_only_whole_numbers_are_steps() -> None:
    assert "1" not in StepSelection(ranges=((0, None),))
    assert 1.0 not in StepSelection(ranges=((0, None),))


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ("a", "'a' is not a step or a range of steps."),
        ("", "'' is not a step or a range of steps."),
        ("1,,2", "'' is not a step or a range of steps."),
        ("-3", "'-3' is not a step or a range of steps."),
        (-3, "'-3' is not a step or a range of steps."),
        ("1-2-3", "'1-2-3' is not a step or a range of steps."),
        ("1.5", "'1.5' is not a step or a range of steps."),
        (1.5, "1.5 is not a step or a range of steps."),
        ("0-9,7-5", "the range '7-5' ends before it begins."),
        ([1, "2"], "[1, '2'] has entries that are not whole numbers from 0 up."),
        ([2, -1], "[2, -1] has entries that are not whole numbers from 0 up."),
        ([1.0], "[1.0] has entries that are not whole numbers from 0 up."),
        ([], "names no step at all."),
    ],
)
def test_what_is_no_step_is_a_problem_that_says_what_to_write(value: Any, what: str) -> None:
    assert parse_steps(value, where="record(steps=...)") == Problem(
        where="record(steps=...)",
        what=what,
        fix='Write steps like "0-9,20,30-", counted from 0, or leave it out for all of them.',
    )


def test_a_range_is_not_walked_through() -> None:
    chosen = parse_steps(range(5, 2**62), where="record(steps=...)")

    assert isinstance(chosen, StepSelection)
    assert (chosen.ranges, 4 in chosen, 5 in chosen) == (((5, 2**62 - 1),), False, True)
