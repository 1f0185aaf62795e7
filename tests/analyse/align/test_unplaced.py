"""Parts of parameters that nobody has placed are unknown, and no copies that disagree."""

from __future__ import annotations

import pytest

from tests.analyse.merge.test_step_table import part
from tests.made_up import Array, random
from traindiff.analyse.align.two_runs import without_unplaced
from traindiff.analyse.merge.site import MergedSite, Part, SiteKey
from traindiff.analyse.merge.step_table import step_table

WEIGHT = random(8, 6, seed=0)


def grad(values: Array, rank: int = 0, phase: str = "grad") -> Part:
    return part(values, rank=rank, site=(phase, "", "fc.weight", {"grad": "grad", "param": "value"}[phase]))


def entry(*ranks: Array, there: Array, more: tuple[Part, ...] = (), key: str = "grad") -> MergedSite:
    """What becomes of a parameter's gradient in a run that holds these on its ranks; the other run has it whole."""
    here = step_table([*(grad(values, rank) for rank, values in enumerate(ranks)), *more])
    whole = step_table([grad(there), grad(there, phase="param")])
    found = without_unplaced(here, whole)
    return found[SiteKey(key, "", "fc.weight", {"grad": "grad", "param": "value"}[key])]


def test_parts_that_differ_and_have_another_shape_are_unknown() -> None:
    found = entry(WEIGHT[:4], WEIGHT[4:], there=WEIGHT)

    assert found.apart == ()
    assert found.unobserved == (
        "ranks hold different values of shape [4, 6], and in the other run it is [8, 6]: declare which part each has "
        'with record(shards=[traindiff.shard("fc.weight", dim=..., axis=...)])'
    )


@pytest.mark.parametrize(
    ("ranks", "there"),
    [((WEIGHT, WEIGHT * 2), WEIGHT), ((WEIGHT[:4], WEIGHT[:4]), WEIGHT), ((WEIGHT[:4],), WEIGHT)],
    ids=["copies that disagree", "copies that agree", "of one rank"],
)
def test_everything_else_is_left_as_it_is(ranks: tuple[Array, ...], there: Array) -> None:
    found = entry(*ranks, there=there)

    assert found.unobserved == ""
    assert bool(found.apart) == (len(ranks) == 2 and ranks[0] is WEIGHT)


def test_what_else_there_is_of_such_a_parameter_is_unknown_as_well() -> None:
    """Its state may be the same on all ranks: zeros, at first."""
    zeros = WEIGHT[:4] * 0
    same = tuple(grad(zeros, rank, phase="param") for rank in range(2))

    assert entry(WEIGHT[:4], WEIGHT[4:], there=WEIGHT, more=same, key="param").unobserved != ""


def test_what_the_other_run_does_not_have_is_left_as_it_is() -> None:
    here = step_table([grad(values, rank) for rank, values in enumerate((WEIGHT[:4], WEIGHT[4:]))])

    assert without_unplaced(here, {}) == here
