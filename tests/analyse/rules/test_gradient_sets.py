"""Sets of parameters are named by the share of all squares that their gradients hold."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.analyse.merge.test_step_table import part
from tests.made_up import random
from traindiff.analyse.merge.site import Part
from traindiff.analyse.merge.step_table import step_table
from traindiff.analyse.rules.reported import Gradients, ReportedNumbersFit, counted_often, gradients_of, set_of
from traindiff.analyse.rules.rule import RunFacts
from traindiff.core.shards import Shard

SQUARES = {"wte.weight": 1.0, "h.0.weight": 2.0, "h.0.bias": 4.0, "h.1.weight": 8.0, "h.1.bias": 17.0}
WHOLE = sum(SQUARES.values())


def gradients(**about: Any) -> Gradients:
    given: dict[str, Any] = {
        "squares": SQUARES, "copied": frozenset(), "divided": frozenset(), "ranks": 1,
        "dimensions": {path: 1 + path.endswith("weight") for path in SQUARES}, "contributed": None, "tolerance": 1e-6,
        **about,
    }  # fmt: skip
    return Gradients(**given)


@pytest.mark.parametrize(
    ("squares", "words"),
    [
        (17.0, "h.1.bias"),
        (21.0, "all parameters with one axis (biases, norms)"),
        (11.0, "all parameters with two axes or more"),
        (6.0, "all of h.0.*"),
        (31.0, "all of h.*"),
        (10.0, ""),  # both weights of h: only what the beginning or the end of paths have in common is a set
        (5.0, ""),
        (WHOLE, ""),
        (17.0 * (1 + 1e-4), ""),
    ],
)
def test_a_set_is_named_by_its_share(squares: float, words: str) -> None:
    assert set_of(gradients(), squares / WHOLE) == words


def test_a_share_that_several_sets_have_names_none() -> None:
    alike = gradients(squares={**SQUARES, "wte.weight": 17.0})

    assert set_of(alike, 17.0 / sum(alike.squares.values())) == ""


def test_what_all_ranks_hold_and_what_they_divide_are_sets() -> None:
    held = gradients(
        copied=frozenset({"wte.weight", "h.1.bias"}), divided=frozenset({"h.0.bias", "h.1.weight"}), ranks=4
    )

    assert set_of(held, 18.0 / WHOLE) == "all parameters of which ranks hold copies"
    assert set_of(held, 12.0 / WHOLE) == "all parameters that are divided over ranks"


@pytest.mark.parametrize(
    ("ranks", "excess", "found"),
    [
        (1, 17.0, ("h.1.bias", "twice")),
        (4, 17.0, ("h.1.bias", "twice")),
        (4, 3 * 17.0, ("h.1.bias", "4 times")),
        (1, 3 * 17.0, None),
        (2, 5.0, None),
    ],
)
def test_what_is_counted_on_every_rank_is_counted_so_often(
    ranks: int, excess: float, found: tuple[str, str] | None
) -> None:
    assert counted_often(gradients(ranks=ranks), excess / WHOLE) == found


def gradient(path: str, *, rank: int = 0, stage: str = "", dtype: str = "float32", **about: Any) -> Part:
    shape = (4,) if path.endswith("bias") else (4, 6)
    values = random(*shape, seed=len(path), dtype=dtype)
    shard = about.get("shard")
    if shard is not None:
        values = values[shard.offset[0] : shard.offset[0] + shard.shape[0]]
    return part(values, rank=rank, site=("grad", stage, path, "grad"), **about)


def of(*parts: Part) -> Gradients | None:
    return gradients_of(step_table(parts))


def half(number: int) -> Shard:
    return Shard(shape=(2, 6), global_shape=(4, 6), offset=(2 * number, 0))


def test_gradients_of_a_step_are_known_by_rank_and_part() -> None:
    found = of(
        *(gradient("fc.bias", rank=rank) for rank in range(2)),
        *(gradient("fc.weight", rank=rank, shard=half(rank)) for rank in range(2)),
        gradient("odd.weight"),
    )

    assert found is not None
    assert (found.copied, found.divided, found.ranks) == ({"fc.bias"}, {"fc.weight"}, 2)
    assert found.dimensions == {"fc.bias": 1, "fc.weight": 2, "odd.weight": 2}
    sizes = [np.linalg.norm(random(*shape, seed=seed)) for shape, seed in (((4,), 7), ((4, 6), 9), ((4, 6), 10))]
    assert found.norm == pytest.approx(math.hypot(*sizes), rel=1e-6)
    assert found.contributed is None
    assert found.tolerance == 64 * 2.0**-24


def test_what_backward_gave_is_known_where_all_of_it_was_recorded() -> None:
    both = [gradient(path, stage=stage) for path in ("fc.bias", "fc.weight") for stage in ("", "micro")]

    known, partly = of(*both), of(*both[:3])

    assert known is not None
    assert known.contributed == pytest.approx(known.norm)
    assert partly is not None
    assert partly.contributed is None


def test_a_norm_of_short_or_many_numbers_is_less_certain() -> None:
    short, many = (
        of(gradient("fc.bias", dtype="float16")),
        of(part(random(100, 100, seed=0), site=("grad", "", "fc.weight", "grad"))),
    )

    assert short is not None
    assert short.tolerance == 4 * 2.0**-11
    assert many is not None
    assert many.tolerance == 100 * 2.0**-24


@pytest.mark.parametrize(
    "parts",
    [
        (),
        (gradient("fc.bias"), gradient("fc.weight", unobserved="sparse")),
        (gradient("fc.bias"), part(np.full((4, 6), np.nan), site=("grad", "", "fc.weight", "grad"))),
        (gradient("fc.bias", merge="sum"), gradient("fc.bias", merge="sum", micro_step=1)),
        (gradient("fc.bias"), part(random(4, seed=1), rank=1, site=("grad", "", "fc.bias", "grad"))),
    ],
    ids=["none", "unknown", "not finite", "a sum of terms", "copies that differ"],
)
def test_where_gradients_are_not_all_known_nothing_is(parts: tuple[Part, ...]) -> None:
    assert of(*parts) is None


def test_a_parameter_without_a_gradient_leaves_the_others_known() -> None:
    parts = gradient("fc.bias"), gradient("fc.weight", unobserved="no gradient: none")

    found = of(*parts)

    assert found is not None
    assert found.squares.keys() == {"fc.bias"}


@pytest.mark.parametrize("complete", [True, False])
def test_nothing_is_said_of_a_run_that_did_not_record_all_gradients(complete: bool) -> None:
    weight = gradient("fc.weight")
    norm = float(np.sqrt(weight[2]["sum_of_squares"]))
    logged = part(np.array(norm), site=("loss", "", "grad_norm", "logged"))
    rule = ReportedNumbersFit(RunFacts(complete=complete))
    table = step_table([gradient("fc.bias"), weight, logged])

    rule.step(table, step=0)
    found = rule.step(table, step=1)

    assert [one.evidence["what"] for one in found] == (["fc.bias"] if complete else [])
