"""Calls that clip gradients, as a step has recorded them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.analyse.merge.test_step_table import part
from tests.made_up import random
from traindiff.analyse.merge.recorded_calls import Clip, clips
from traindiff.analyse.merge.site import Part
from traindiff.analyse.merge.step_table import step_table
from traindiff.core.observation import ALL_GRADIENTS

GRADIENT = random(6, 4, seed=0)
LARGEST = float(np.abs(GRADIENT).max())


def number(slot: str, value: float, *, rank: int = 0, unobserved: str = "") -> Part:
    site = ("grad", "clipped", ALL_GRADIENTS, slot)
    return part(np.array(value), rank=rank, site=site, order=9, unobserved=unobserved)


def gradient(*, rank: int = 0) -> Part:
    return part(GRADIENT, rank=rank, site=("grad", "", "fc.weight", "grad"))


def clips_of(*numbers: Part, ranks: int = 1) -> list[Clip]:
    return clips(step_table([*(gradient(rank=rank) for rank in range(ranks)), *numbers]))


@pytest.mark.parametrize(
    ("norm", "effective", "coefficient"),
    [(4.0, True, 2.0 / 4.000001), (2.0, False, 1.0), (1.9, False, 1.0), (2.0001, True, 2.0 / 2.000101)],
)
def test_clipping_to_a_norm_multiplies_by_the_limit_over_the_norm(
    norm: float, effective: bool, coefficient: float
) -> None:
    (clip,) = clips_of(number("norm", norm), number("max_norm", 2.0))

    assert (clip.limit, clip.norm, clip.effective) == (2.0, norm, effective)
    assert clip.coefficient == pytest.approx(coefficient, rel=1e-9)
    assert clip.what == "gradients to a norm of 2"


def test_a_call_with_an_infinite_limit_measures_the_norm_and_clips_nothing() -> None:
    (clip,) = clips_of(number("norm", 2.0), number("max_norm", math.inf))

    assert (clip.limit, clip.norm, clip.effective, clip.coefficient) == (math.inf, 2.0, False, 1.0)


def test_a_norm_that_was_recorded_as_its_square_is_its_root() -> None:
    (clip,) = clips_of(number("squared_norm", 4.0), number("max_norm", 0.5))

    assert (clip.norm, clip.effective) == (2.0, True)


@pytest.mark.parametrize("norm", [None, ("norm", 2.0, "of several shapes"), ("squared_norm", -0.5, "")])
def test_without_its_norm_nothing_is_known_of_a_call(norm: tuple[str, float, str] | None) -> None:
    known = [number(norm[0], norm[1], unobserved=norm[2])] if norm else []

    assert clips_of(*known, number("max_norm", 0.5)) == []


@pytest.mark.parametrize("slot", ["norm", "squared_norm"])
@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_clips_nothing_that_is_known(slot: str, norm: float) -> None:
    (clip,) = clips_of(number(slot, norm), number("max_norm", 0.5))

    assert str(clip.norm) == str(norm)
    assert (clip.limit, clip.effective, clip.coefficient) == (0.5, False, 1.0)


@pytest.mark.parametrize(("limit", "effective"), [(LARGEST, True), (LARGEST * 1.001, False), (LARGEST / 2, False)])
def test_clipping_elements_has_an_effect_where_the_largest_is_as_large_as_they_may_be(
    limit: float, effective: bool
) -> None:
    (clip,) = clips_of(number("max_value", limit))

    assert (clip.norm, clip.effective, clip.coefficient) == (None, effective, 1.0)
    assert clip.what == f"elements of gradients to {limit:g}"


def test_clipping_to_zero_is_no_error() -> None:
    assert [clip.effective for clip in clips_of(number("max_value", 0.0))] == [False]


@pytest.mark.parametrize(("ranks", "only", "what"), [((0, 2), (0, 2), " on ranks 0 and 2 only"), ((0, 1, 2), (), "")])
def test_ranks_are_named_where_others_with_gradients_do_not_clip(
    ranks: tuple[int, ...], only: tuple[int, ...], what: str
) -> None:
    calls = [number(slot, value, rank=rank) for rank in ranks for slot, value in (("norm", 2.0), ("max_norm", 0.5))]

    (clip,) = clips_of(*calls, ranks=3)

    assert clip.only == only
    assert clip.what == f"gradients to a norm of 0.5{what}"


def test_a_step_without_such_calls_has_none() -> None:
    assert clips_of() == []
