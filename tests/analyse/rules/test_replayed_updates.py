"""What is said of an update, from what a recording has of its replay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.analyse.merge.test_step_table import part
from tests.made_up import Array, random
from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.step_table import step_table
from traindiff.analyse.rules.lost_updates import UpdatesSurviveRounding
from traindiff.analyse.rules.replay import UpdatesFollowSettings
from traindiff.analyse.rules.rule import Rule, RunFacts

ASKED = random(8, 4, seed=0) / 100
ROUNDING = np.full((8, 4), 1e-9, dtype=np.float32)


def judged(
    taken: Array, *, asked: Array = ASKED, residual: float = 50.0, slot: str = "SGD", dtype: str = "float32",
    rounding: Array = ROUNDING, strictness: float = 1.0, rule: type[Rule] = UpdatesFollowSettings, **variants: float,
) -> list[Finding]:  # fmt: skip
    stages: dict[str, Array] = {
        "replayed": asked, "taken": taken, "rounding": rounding, "residual": np.full((8, 4), residual),
        **{f"variant[{name}]": np.full((8, 4), left) for name, left in variants.items()},
    }  # fmt: skip
    parts = [part(values, site=("update", stage, "fc.weight", slot), order=5) for stage, values in stages.items()]
    parameter = part(random(8, 4, seed=1).astype(dtype), site=("param", "", "fc.weight", "value"), order=3)
    return list(rule(RunFacts(), strictness=strictness).step(step_table([*parts, parameter]), step=4) or ())


def said(*given: Any, **more: Any) -> str:
    (finding,) = judged(*given, **more)
    assert (finding.step, finding.phase, finding.path, finding.order) == (4, "update", "fc.weight", 3)
    return finding.message


@pytest.mark.parametrize(
    ("residual", "strictness", "found"), [(2.0, 1.0, 0), (2.1, 1.0, 1), (1.5, 1.0, 0), (1.5, 2.0, 1), (2.1, 0.5, 0)]
)
def test_an_update_within_twice_what_rounding_allows_is_right(residual: float, strictness: float, found: int) -> None:
    assert len(judged(ASKED, residual=residual, strictness=strictness)) == found


def test_a_mistake_that_leaves_nothing_to_explain_is_named_with_what_it_leaves() -> None:
    assert said(-ASKED, **{"other-sign": 0.5, "no-decay": 9.0, "beta2=0.9": 2.1}) == (
        "SGD moves fc.weight in the opposite direction of what maximize asks for. What its settings ask for is up to "
        "50 roundings away, this 0.5."
    )
    assert "moves fc.weight as if beta2 were 0.9." in said(-ASKED, **{"beta2=0.9": 2.0})


def test_a_constant_factor_is_another_learning_rate() -> None:
    assert said(ASKED * 2).startswith("SGD moves fc.weight as if the learning rate were 2 x what it is.")


def test_anything_else_is_said_with_its_size() -> None:
    other = ASKED.copy()
    other[2, 3] += np.float32(0.01)
    apart = 0.01 / np.linalg.norm(ASKED)

    assert said(other).startswith(
        f"SGD moves fc.weight by something else than its settings ask for, {apart:.2g} of its size off."
    )
    assert judged(other, slot="Mine(SGD)") == []  # it may be meant to
    assert said(ASKED * 2, slot="Mine(SGD)").startswith("Mine (a subclass of SGD with a step of its own) moves")


def test_a_subclass_may_be_another_method_and_a_compiled_step_is_read_late() -> None:
    other = ASKED * random(8, 4, seed=3)
    assert judged(other, slot="AdaBelief(Adam)", **{"centered-second-moment": 0.5}) == []
    assert "centered" not in said(other, slot="Adam(compiled)", **{"no-bias-correction": 0.5})
    assert said(other, slot="Mine(Adam)", **{"no-bias-correction": 0.5, "nesterov": 0.1}).startswith(
        "Mine (a subclass of Adam with a step of its own) moves fc.weight without bias correction."
    )
    assert said(other, slot="Adam(compiled)", **{"centered-second-moment": 0.5}).startswith(
        "Adam (compiled) moves fc.weight as if the second moment were"
    )
    assert judged(other, slot="Adam(compiled)") == []
    assert judged(ASKED * 0, slot="SGD(compiled)", **{"no-gradient": 0.0}) == []  # other code may have put it back


@pytest.mark.parametrize("strictness", [1.0, 2.0])
def test_what_a_mistake_explains_is_not_less_where_rules_are_stricter(strictness: float) -> None:
    other = ASKED * random(8, 4, seed=3)
    assert len(judged(other, slot="Mine(Adam)", strictness=strictness, **{"no-bias-correction": 1.5})) == 1
    lost = {"residual": 1.5, "dtype": "float16", "rounding": np.abs(ASKED), "rule": UpdatesSurviveRounding}
    assert len(judged(ASKED * (np.arange(32).reshape(8, 4) > 20), strictness=strictness, **lost)) == 1


def test_mistakes_that_look_alike_in_a_step_are_all_said() -> None:
    message = said(-ASKED, **{"no-decay": 0.5, "other-sign": 0.4, "beta2=0.9": 0.1})

    assert message.startswith("SGD moves fc.weight as if beta2 were 0.9.")
    assert "tell it from" not in message
    assert said(-ASKED, **{"no-decay": 0.5, "other-sign": 0.4}).endswith(
        "This step does not tell it from: in the opposite direction of what maximize asks for."
    )


@pytest.mark.parametrize(
    ("still", "what"), [(32, "never moves fc.weight"), (18, "leaves 56% of fc.weight as it was"), (16, "by something")]
)
def test_elements_that_do_not_move_are_counted(still: int, what: str) -> None:
    taken = (ASKED * random(8, 4, seed=3)).reshape(-1)
    taken[:still] = 0

    assert what in said(taken.reshape(8, 4))


def test_elements_that_need_not_move_are_not_counted() -> None:
    asked, taken = ASKED.copy(), ASKED * random(8, 4, seed=3)
    asked.reshape(-1)[:12] = taken.reshape(-1)[:12] = 0  # 20 are to move
    taken.reshape(-1)[12:24] = 0  # 12 of them do not

    assert "leaves 60% of fc.weight as it was" in said(taken, asked=asked)


@pytest.mark.parametrize(
    ("dtype", "size", "found"),
    [("float16", 1.0, 1), ("float32", 1.0, 0), ("float16", 1e-4, 0)],
    ids=["short", "long", "of nothing"],
)
def test_a_right_update_that_is_rounded_away_is_lost_where_it_would_have_mattered(
    dtype: str, size: float, found: int
) -> None:
    """In a thousand steps it would have moved the parameter by one rounding."""
    asked = ASKED * np.float32(size)
    taken = asked.copy()
    taken.reshape(-1)[:20] = 0

    lost = judged(taken, asked=asked, residual=0.9, dtype=dtype, rounding=np.abs(ASKED), rule=UpdatesSurviveRounding)

    assert [one.kind for one in lost] == ["lost-update"] * found
    if lost:
        assert lost[0].message.startswith(
            "62% of the elements of fc.weight do not move, although SGD computes an update"
        )
        assert judged(taken, asked=asked, residual=0.9, dtype=dtype, rounding=np.abs(ASKED), strictness=0.5) == []


def test_without_all_of_a_replay_nothing_is_said() -> None:
    for lacking in ("replayed", "taken", "rounding", "residual"):
        parts = [
            part(ASKED * 50, site=("update", stage, "fc.weight", "SGD"))
            for stage in ("replayed", "taken", "rounding", "residual")
            if stage != lacking
        ]
        assert UpdatesFollowSettings(RunFacts()).step(step_table(parts), step=0) == []


@pytest.mark.parametrize("factor", [0.01, 0.5, 2.0, 100.0])
@pytest.mark.parametrize(("off", "fits"), [(1.9, True), (2.1, False)])
def test_a_factor_explains_an_update_up_to_the_rounding_of_the_larger_of_both(
    factor: float, off: float, fits: bool
) -> None:
    """What is stored is rounded by as much, however small the update is."""
    direction = random(8, 4, seed=5)
    direction -= ASKED * np.float32(np.sum(ASKED * direction) / np.sum(ASKED * ASKED))
    rounding = np.full((8, 4), 1e-5, dtype=np.float32)
    left = off * np.linalg.norm(rounding) * max(1.0, factor) / np.linalg.norm(direction)

    message = said(ASKED * np.float32(factor) + direction * np.float32(left), rounding=rounding)

    assert ("as if the learning rate were" in message) == fits
