"""An indexed table gives the sites of a kind that a look at all sites gives, in the same order."""

from __future__ import annotations

from itertools import combinations

import pytest

from tests.analyse.merge.test_step_table import part
from tests.made_up import random
from traindiff.analyse.merge.indexed import IndexedTable, indexed, once, sites
from traindiff.analyse.merge.site import StepTable
from traindiff.analyse.merge.step_table import step_table

PHASES = ("batch", "forward", "backward", "grad", "optimizer", "param")


def table() -> StepTable:
    """A step whose kinds alternate, so that the sites of two kinds lie among each other."""
    places = [
        (phase, stage, f"{number}.weight", "grad")
        for number in range(3)
        for phase, stage in [*((phase, "") for phase in PHASES), ("grad", "micro"), ("param", "before")]
    ]
    return step_table([part(random(4, seed=n), site=site, order=n) for n, site in enumerate(places)])


@pytest.mark.parametrize("stage", [None, "", "micro", "before", "nothing"])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_sites_are_those_of_a_look_at_all_sites(count: int, stage: str | None) -> None:
    plain = table()
    quick = indexed(plain)
    for phases in combinations((*PHASES, "update"), count):
        expected = [
            (key, entry)
            for key, entry in plain.items()
            if (not phases or key.phase in phases) and (stage is None or key.stage == stage)
        ]

        for _ in range(2):  # the second time from what is known
            assert [*sites(quick, *phases, stage=stage)] == expected
        assert [*sites(plain, *phases, stage=stage)] == expected


def test_a_table_is_indexed_once_and_is_the_same_table() -> None:
    plain = table()
    quick = indexed(plain)

    assert quick == plain
    assert [*quick] == [*plain]
    assert indexed(quick) is quick


def test_what_is_asked_again_is_computed_once_for_each_table() -> None:
    asked = []

    @once
    def num_sites(given: StepTable) -> int:
        asked.append(given)
        return len(given)

    one, other, plain = indexed(table()), indexed({}), table()

    assert [num_sites(given) for given in (one, one, other, other)] == [len(plain), len(plain), 0, 0]
    assert [id(given) for given in asked] == [id(one), id(other)]
    assert [num_sites(plain), num_sites(plain)] == [len(plain)] * 2
    assert len(asked) == 4


def test_a_table_that_was_dropped_holds_nothing_of_its_step() -> None:
    quick = indexed(table())
    sites(quick, "grad", "param")
    once(len)(quick)

    quick.clear()

    assert (len(quick), quick.by_kind, quick.found) == (0, {}, {})
    assert isinstance(quick, IndexedTable)
    assert not sites(quick, "grad", "param")
