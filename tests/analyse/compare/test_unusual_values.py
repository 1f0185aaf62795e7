"""NaN, infinities, empty tensors, whole numbers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.made_up import Array, Compared, Edit, Seen, Step, at

FC = ("forward", "", "fc", "output[0]")
INDICES = ("forward", "", "fc", "output[1]")


def spoiled(*places: tuple[int, int], value: float = np.nan) -> Edit:
    def change(x: Array) -> Array:
        for place in places:
            x[place] = value
        return x

    return at(FC, change, step=1)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_in_one_run_is_never_within_tolerance(compared: Compared, value: float) -> None:
    for comparison in (
        compared(spoiled((0, 0), value=value)),
        compared(baseline_edit=spoiled((0, 0), value=value)),
        compared(spoiled((0, 0), value=value), rtol=1e9, atol=1e9),
    ):
        first = comparison.first_divergence
        assert comparison.verdict == "diverged"
        assert first is not None
        assert (first.kind, first.step, first.path) == ("non-finite", 1, "fc")
        assert first.to_json()["difference"] is None


def test_nan_at_other_places_is_a_finding(compared: Compared) -> None:
    comparison = compared(spoiled((0, 0)), baseline_edit=spoiled((1, 1)))

    assert comparison.verdict == "diverged"
    assert comparison.first_divergence is not None
    assert comparison.first_divergence.message == "NaN or infinities stand at other places than in the baseline."


def test_nan_at_the_same_places_in_both_is_said(compared: Compared) -> None:
    comparison = compared(spoiled((0, 0), (2, 3)), baseline_edit=spoiled((0, 0), (2, 3)))

    assert comparison.verdict == "identical"
    assert "NaN at the same places in both runs, first at step 1, forward of fc output[0]." in comparison.notes


def test_nan_in_one_run_and_infinity_in_the_other_are_different(compared: Compared) -> None:
    assert compared(spoiled((0, 0)), baseline_edit=spoiled((0, 0), value=np.inf)).verdict == "diverged"


def _with(values: Array) -> Edit:
    def edit(_step: int, sites: Step) -> None:
        sites[INDICES] = Seen(values=values)

    return edit


@pytest.mark.parametrize("dtype", ["float32", "int64", "bool"])
def test_empty_tensors_are_equal(compared: Compared, dtype: str) -> None:
    empty = np.zeros((0, 7), dtype)

    assert compared(_with(empty), baseline_edit=_with(empty)).verdict == "identical"


def test_an_empty_tensor_in_one_run_only_is_another_shape(compared: Compared) -> None:
    edits = _with(np.zeros((0, 7), np.float32)), _with(np.ones((3, 7), np.float32))

    for edit, baseline_edit in (edits, edits[::-1]):
        first = compared(edit, baseline_edit=baseline_edit).first_divergence

        assert first is not None
        assert (first.path, first.slot, first.kind) == ("fc", "output[1]", "shape")


def test_whole_numbers_that_differ_without_a_reason_are_a_finding(compared: Compared) -> None:
    numbers = np.arange(12).reshape(3, 4)
    first = compared(_with(numbers[::-1]), baseline_edit=_with(numbers)).first_divergence

    assert compared(_with(numbers), baseline_edit=_with(numbers)).verdict == "identical"
    assert first is not None
    assert (first.path, first.slot, first.kind) == ("fc", "output[1]", "permuted")


def test_whole_numbers_may_flip_where_noise_came_in(compared: Compared) -> None:
    numbers = np.arange(12).reshape(3, 4)

    def noisy(step: int, sites: Step) -> None:
        at(FC, lambda x: x * np.float32(1 + 2e-7))(step, sites)
        _with(numbers + 1)(step, sites)

    assert compared(noisy, baseline_edit=_with(numbers)).verdict == "equivalent"


def test_a_tensor_of_zeros_is_equal_to_itself_and_nothing_else(compared: Compared) -> None:
    zeros = np.zeros((3, 4), np.float32)

    assert compared(_with(zeros), baseline_edit=_with(zeros)).verdict == "identical"
    assert compared(_with(zeros + np.float32(1e-30)), baseline_edit=_with(zeros)).verdict == "diverged"


def test_negative_zero_is_equivalent_to_zero(compared: Compared) -> None:
    zeros = np.zeros((3, 4), np.float32)

    assert compared(_with(-zeros), baseline_edit=_with(zeros)).verdict == "equivalent"
