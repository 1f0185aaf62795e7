"""What is said of several verifications, and of runs that failed."""

from __future__ import annotations

import pytest

from traindiff.analyse.compare.investigation import Matrix, MatrixRow
from traindiff.analyse.compare.verification import _STACK_LINES as MOST
from traindiff.analyse.compare.verification import FailedRank, FailedRun


def row(verdict: str, exit_code: int) -> MatrixRow:
    return MatrixRow(
        name="engine=ddp", varied={}, verdict=verdict, message="", seconds=1.25, output="x", exit_code=exit_code
    )


@pytest.mark.parametrize(
    ("codes", "worst"),
    [
        ([("identical", 0), ("diverged", 1), ("incomplete", 3)], 1),
        ([("identical", 0), ("incomplete", 3), ("refused", 2)], 3),
        ([("equivalent", 0), ("refused", 2)], 2),
        ([("identical", 0), ("impossible", 0)], 0),
        ([("impossible", 0)], 2),
    ],
)
def test_exit_codes_are_ordered_by_how_bad_they_are(codes: list[tuple[str, int]], worst: int) -> None:
    assert Matrix(recipe="r", output="o", rows=tuple(row(*one) for one in codes)).exit_code == worst


def failed(*ranks: FailedRank, first: int = 0) -> list[str]:
    return list(FailedRun(run="candidate", first=first, ranks=ranks).lines())


def rank(number: int, message: str, **about: object) -> FailedRank:
    return FailedRank(**{"rank": number, "how": "raised", "message": message, "num_steps": 0, **about})


@pytest.mark.parametrize(("steps", "text"), [(0, "no step"), (1, "1 step"), (2, "2 steps")])
def test_a_failed_run_says_how_far_it_came(steps: int, text: str) -> None:
    (line,) = failed(rank(0, "Rank 0 was killed", num_steps=steps, last_observation="fc output[0]"))

    assert line == (
        f"The run candidate failed. Rank 0 was killed. Before that it had ended {text}. Its last observation: "
        "fc output[0]."
    )


def test_the_rank_that_explains_the_others_comes_first_with_the_end_of_its_output() -> None:
    lines = failed(
        rank(0, "Rank 0 waited!", output="waiting"),
        rank(1, "Rank 1 raised ValueError", output="one\ntwo\n", output_file="rank-1.txt"),
        first=1,
    )

    assert lines == [
        "The run candidate failed. Rank 1 raised ValueError. Before that it had ended no step.",
        "  The end of what it printed (rank-1.txt):",
        "    one",
        "    two",
        "",
        "Rank 0 waited!",
    ]


def stack(first: str, count: int) -> list[str]:
    """The lines about the place where a rank was."""
    said = "\n".join([first, *(f"line {number}" for number in range(1, count))])
    return [line.strip() for line in failed(rank(2, "Rank 2 hung.", stack=said), first=2)[2:]]


def test_of_a_long_traceback_the_end_is_shown_because_the_innermost_call_ends_it() -> None:
    assert stack("Traceback (most recent call last):", MOST + 1) == ["...", *(f"line {n}" for n in range(1, MOST + 1))]


def test_of_a_long_dumped_stack_the_beginning_is_shown_because_the_innermost_call_begins_it() -> None:
    assert stack("line 0", MOST + 1) == [*(f"line {n}" for n in range(MOST)), "..."]


def test_a_short_stack_is_shown_as_a_whole() -> None:
    assert stack("line 0", MOST) == [f"line {n}" for n in range(MOST)]
    assert failed(rank(2, "Rank 2 hung.", stack="line 0"), first=2)[1] == "  Where rank 2 was:"
