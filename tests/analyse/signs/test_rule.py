"""The rule of 0.97 and 0.03, applied exactly."""

from __future__ import annotations

import pytest

from traindiff.analyse.compare.comparing import direction_notes
from traindiff.analyse.signs import Agreement, BrokenRule, Similarities


def similarities(**rows: list[tuple[int, int] | None]) -> Similarities:
    parameters = {
        name: tuple(None if one is None else Agreement(same=one[0], count=one[1]) for one in row)
        for name, row in rows.items()
    }
    steps = tuple(range(max(map(len, rows.values()), default=0)))
    return Similarities(steps=steps, parameters=parameters, unknown={})


def of_parameter(found: Similarities) -> list[tuple[int, str]]:
    return [(one.step, one.parameter) for one in found.broken if one.parameter is not None]


@pytest.mark.parametrize(("same", "broken"), [(970, []), (969, [(0, "w")]), (1000, []), (0, [(0, "w")])])
def test_the_first_step_must_reach_97_percent(same: int, broken: list[tuple[int, str]]) -> None:
    assert of_parameter(similarities(w=[(same, 1000)])) == broken


@pytest.mark.parametrize(
    ("later", "broken"), [(970, []), (969, [(1, "w")])], ids=["exactly 0.03 less is allowed", "more is not"]
)
def test_a_drop_of_more_than_3_points_breaks_the_rule_at_its_step(later: int, broken: list[tuple[int, str]]) -> None:
    assert of_parameter(similarities(w=[(1000, 1000), (later, 1000)])) == broken


def test_a_slow_decline_keeps_the_rule() -> None:
    assert of_parameter(similarities(w=[(1000 - 20 * step, 1000) for step in range(20)])) == []


def test_a_recovery_is_no_drop_and_the_next_drop_is_one() -> None:
    found = similarities(w=[(99, 100), (90, 100), (99, 100), (95, 100)])
    assert of_parameter(found) == [(1, "w"), (3, "w")]
    assert found.broken[0] == BrokenRule(step=1, parameter="w", similarity=0.90, before=0.99)


def test_steps_in_which_a_parameter_has_no_gradient_are_passed_over() -> None:
    assert of_parameter(similarities(w=[None, (98, 100), None, (90, 100)])) == [(3, "w")]
    assert of_parameter(similarities(w=[(0, 0), (96, 100)])) == [(1, "w")]


def test_all_parameters_together_come_last_in_their_step() -> None:
    found = similarities(small=[(0, 1), (1, 1)], large=[(100, 100), (50, 100)])

    assert [(one.step, one.parameter) for one in found.broken] == [(0, "small"), (1, "large"), (1, None)]
    assert [one.share for one in found.summary] == [100 / 101, 51 / 101]


def test_nothing_compared_breaks_nothing() -> None:
    found = similarities()
    assert (found.summary, found.broken) == ((), ())


def test_steps_of_which_nothing_could_be_compared_have_no_share() -> None:
    found = Similarities(steps=(0, 1), parameters={}, unknown={"w": "its shape differs"})
    assert [one.share for one in found.summary] == [None, None]
    assert found.broken == ()


def test_notes_name_the_first_of_several_parameters() -> None:
    found = Similarities(
        steps=(3,), parameters={"w": (Agreement(same=99, count=100),)}, only=(("a", "b", "c"), ("d",)),
        unknown={"e": "its shape differs", "f": "its shape differs"}, zeros_known=False,
    )  # fmt: skip

    assert direction_notes(found) == [
        "Directions of gradients: 0.9900 of all elements agree at least (in step 3), over step 3.",
        "One of the runs does not tell zero from negative, so the two count as one direction in both.",
        "Directions only in the baseline: a and 2 more parameters.",
        "Directions only in the candidate: d.",
        "Directions not compared: e (its shape differs) and 1 more parameter.",
    ]


def test_of_many_broken_steps_the_first_are_named_with_their_smallest_similarities() -> None:
    rows = {name: [(10 * place, 100)] * 5 for place, name in enumerate("abcde")}
    # A step after the first breaks the rule where it drops.
    found = similarities(**{name: [row[0], *([(100, 100), row[0]] * 2)] for name, row in rows.items()})

    notes = [note for note in direction_notes(found) if "rule" in note]

    assert notes[0] == (
        "The 0.97 / 0.03 rule of direction similarity is broken in step 0: all parameters together (0.2000), "
        "a (0.0000), b (0.1000), c (0.2000) and 2 more parameters."
    )
    assert "step 2: all parameters together (0.2000 after 1.0000), a (0.0000 after 1.0000)" in notes[1]
    assert notes[-1].startswith("That rule is a fixed limit, which correct runs break too")
