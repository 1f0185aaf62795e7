"""Findings in words and numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from traindiff.analyse.findings import Finding, also_text, micro_steps_text, ranks_text, size_text, steps_text


def finding(difference: float, floor: float) -> Finding:
    return Finding(
        step=1, phase="forward", path="fc", slot="output[0]", order=0, kind="value", message="They differ.",
        difference=difference, floor=floor,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("difference", "floor", "ratio"),
    [(3.0, 2.0, 1.5), (0.0, 0.0, 0.0), (0.0, 1.0, 0.0), (1.0, 0.0, math.inf), (math.inf, math.inf, 0.0)],
)
def test_a_ratio_is_that_of_a_difference_to_its_floor(difference: float, floor: float, ratio: float) -> None:
    assert finding(difference, floor).ratio == ratio


def test_a_size_is_given_where_there_is_one() -> None:
    assert size_text(finding(3e-3, 2e-6)) == "relative L2 difference 0.003 = 1.5e+03 x its floor of 2e-06"
    assert size_text(finding(math.inf, 1.0)) == size_text(finding(1.0, 0.0)) == ""


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([], "no step"),
        ([4], "step 4"),
        (range(3), "3 steps (0 to 2)"),
        ([0, 1, 3], "3 steps (0 to 3, with gaps)"),
        ([0, 2, 4], "3 steps (0 to 4, with gaps)"),
    ],
)
def test_steps_in_words(numbers: Sequence[int], message: str) -> None:
    assert steps_text(numbers) == message


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([1], "Rank 1"),
        ([0, 2, 3], "Ranks 0, 2 and 3"),
        (range(8), "Ranks 0, 1, 2, 3, 4, 5, 6 and 7"),
        (range(9), "Ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1 more"),
    ],
)
def test_ranks_in_words(numbers: Sequence[int], message: str) -> None:
    assert ranks_text(numbers) == message
    assert ranks_text(numbers, capital=False) == message.replace("Rank", "rank")


def test_micro_steps_in_words() -> None:
    assert micro_steps_text([3]) == "micro-step 3"
    assert micro_steps_text([0, 2, 3]) == "micro-steps 0, 2 and 3"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), ""),
        (("b.weight",), "The same holds for 1 more parameter: b.weight."),
        (("b", "c"), "The same holds for 2 more parameters: b, c."),
        (("b", "c", "d"), "The same holds for 3 more parameters: b, c, ..."),
        (("adam.groups[1]",), "The same holds for 1 more group: adam.groups[1]."),
    ],
)
def test_where_else_the_same_was_found(more: tuple[str, ...], message: str) -> None:
    assert also_text(["a", *more]) == message
