"""Micro-steps as people count them."""

from __future__ import annotations

import pytest

from traindiff.analyse.counting import as_people_count


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lacks what micro-step 2 of 4 contributed", "lacks what micro-step 2 (the third of 4) contributed"),
        ("in micro-step 11 of 16: x", "in micro-step 11 (number 12 of 16): x"),
        ("micro-step 2 (the third of 4)", "micro-step 2 (the third of 4)"),
        ("micro-steps 0, 2 and 3 of 4", "micro-steps 0, 2 and 3 of 4"),
    ],
)
def test_the_place_among_all_is_said_where_the_number_of_all_is(text: str, said: str) -> None:
    assert as_people_count(text) == said
