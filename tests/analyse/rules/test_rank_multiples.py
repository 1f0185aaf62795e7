"""Of gradients that ranks hold differently, those count that clipping by a norm does not explain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tests.analyse.merge.test_step_table import part
from tests.made_up import Array, random
from traindiff.analyse.merge.site import Part, StepTable
from traindiff.analyse.merge.step_table import step_table
from traindiff.analyse.rules import CopiesAgree, RunFacts
from traindiff.analyse.rules.rank_multiples import common_multiples
from traindiff.core.observation import ALL_GRADIENTS

NAMES = ("a", "b", "c", "d")


def held(rank: int, values: Sequence[Array]) -> list[Part]:
    named = zip(NAMES, values, strict=True)
    return [
        part(one, rank=rank, site=("grad", "", f"{name}.weight", "grad"), order=order)
        for order, (name, one) in enumerate(named)
    ]


def step(other: Sequence[Array], *, clipped: bool = True) -> StepTable:
    own = [random(6, 8, seed=number) for number in range(len(NAMES))]
    clips = [
        part(np.array(value), rank=rank, site=("grad", "clipped", ALL_GRADIENTS, slot), order=9)
        for rank in range(2)
        for slot, value in (("norm", 3.0), ("max_norm", 1.0))
    ]
    return step_table([*held(0, own), *held(1, other), *(clips if clipped else ())])


def scaled(factor: float, *, odd: int | None = None) -> list[Array]:
    own = [random(6, 8, seed=number) * np.float32(factor) for number in range(len(NAMES))]
    if odd is not None:
        own[odd] = random(6, 8, seed=99)
    return own


def test_the_gradient_that_differs_otherwise_is_the_one_that_counts() -> None:
    rule = CopiesAgree(RunFacts())

    findings = list(rule.step(step(scaled(0.8, odd=2)), step=0))

    assert [one.path for one in findings] == ["c.weight"]
    assert findings[0].message.endswith(
        "(All other gradients on rank 1 are 0.8 x those on rank 0, as clipping to a norm makes them.)"
    )


@pytest.mark.parametrize(
    ("other", "clipped"),
    [(scaled(0.8), True), (scaled(0.8, odd=2), False), (scaled(1.0, odd=2), True)],
    ids=["all by one factor", "nothing clips", "the others agree"],
)
def test_without_another_gradient_beside_a_factor_all_count(other: list[Array], clipped: bool) -> None:
    table = step(other, clipped=clipped)

    assert common_multiples(table) is None
    assert len(list(CopiesAgree(RunFacts()).step(table, step=0))) == sum(bool(one.apart) for one in table.values())
