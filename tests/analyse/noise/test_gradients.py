"""What is known of gradients beyond their size: the terms they are sums of, and the parts that are noise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.made_up import Compared, Seen, Step, at, random, record, same, summary_of
from traindiff.analyse.compare import compare
from traindiff.analyse.merge.distance import Pair
from traindiff.analyse.merge.site import MergedSite, SiteKey
from traindiff.analyse.noise.gradients import FEW_TURNED, share_of_noise, terms_by_module, turned_share


def test_the_share_of_noise_is_the_share_of_groups_that_hold_nothing_larger_than_the_error() -> None:
    gradient = random(96, seed=1)
    gradient[32:64] *= np.float32(1e-8)  # the key's third of a joint bias

    assert share_of_noise(summary_of(gradient), gradient.shape, 1e-6) == pytest.approx(1 / 3)
    assert share_of_noise(summary_of(random(96, seed=1)), (96,), 1e-6) == 0.0


def test_rows_of_a_matrix_are_groups_too() -> None:
    gradient = random(64, 8, seed=2)
    gradient[:16] = 0.0

    assert share_of_noise(summary_of(gradient), gradient.shape, 1e-6) == pytest.approx(1 / 4)


@pytest.mark.parametrize("shape", [(8,), (0,), ()])
def test_nothing_is_known_of_the_parts_of_a_small_gradient(shape: tuple[int, ...]) -> None:
    assert share_of_noise(summary_of(random(*shape, seed=3)), shape, 1e-6) == 0.0


def _gradients(smallest: float, moved: float, others: float = 0.0) -> Pair:
    """144 elements, one of them small. In the candidate it has moved, and a large one has too."""
    values = np.sign(random(144, seed=4)) * np.float32(1.0) + random(144, seed=5) * np.float32(0.1)
    values[7] = smallest
    candidate = values.copy()
    candidate[7] += np.float32(moved)
    candidate[8] += np.float32(others)
    entries = [
        MergedSite(
            key=SiteKey("grad", "", "fc.weight", "grad"), order=0, dtype="float32", shape=(144,),
            summary=summary_of(one),
        )
        for one in (values, candidate)
    ]  # fmt: skip
    return Pair(baseline=entries[0], candidate=entries[1])


@pytest.mark.parametrize(
    ("smallest", "moved", "others", "few"),
    [
        (1e-5, -2e-5, 0.0, True),
        (1e-5, 0.0, 0.0, False),
        (0.0, 1e-5, 0.0, True),
        (0.0, 0.0, 1e-3, False),
        (1e-2, 0.0, 1e-3, False),
    ],
    ids=["turns around", "no bit differs", "leaves zero", "stays zero", "too large"],
)
def test_a_few_elements_may_turn_around_where_one_lies_within_its_error(
    smallest: float, moved: float, others: float, few: bool
) -> None:
    share = turned_share(_gradients(smallest, moved, others), 1e-5)

    assert share == pytest.approx(FEW_TURNED / 144 if few else 0.0)


def test_one_sign_of_144_is_within_the_floor_of_an_adaptive_update(tmp_path: Path) -> None:
    """An element within its error goes the other way: 2 / sqrt(144) of the first update, 30 sqrt(2.6e-5) is less."""

    def build(_step: int) -> Step:
        found: Step = {}
        gradient = np.sign(random(144, seed=4)) + random(144, seed=5) * np.float32(0.1)
        gradient[7] = 1e-5
        value = random(144, seed=6)
        found["param", "before", "w", "value"] = Seen(values=value)
        found["grad", "", "w", "grad"] = Seen(values=gradient)
        for slot, power in (("exp_avg", 1), ("exp_avg_sq", 2)):
            found["optimizer", "", "w", slot] = Seen(values=(gradient**power * np.float32(0.1)).astype(np.float32))
        found["param", "", "w", "value"] = Seen(values=value - np.float32(0.01) * np.sign(gradient))
        return found

    def turned(_: int, step: Step) -> None:
        gradient, value = (step["grad", "", "w", "grad"].values, step["param", "", "w", "value"].values)
        gradient[20] *= np.float32(1 + 1e-5)
        gradient[7] = -1e-5
        value[7] += np.float32(0.02)

    base, candidate = (
        record(tmp_path / name, edit, steps=1, build=build) for name, edit in (("b", same), ("c", turned))
    )
    found = compare(base, candidate)

    (row,) = (one for one in found.differences if one.phase == "update")
    assert row.difference == pytest.approx(2 / 12, rel=0.05)
    assert found.verdict == "equivalent", str(found)


def test_a_module_that_is_called_twice_adds_up_the_terms_of_both_calls() -> None:
    entries = [
        MergedSite(
            key=SiteKey("backward", "", "fc", "output[0]", call, 0), order=call, dtype="float32", shape=(4, 8),
            summary=summary_of(np.full((4, 8), 3.0 + call, dtype=np.float32)),
        )
        for call in range(2)
    ]  # fmt: skip

    terms = terms_by_module([Pair(baseline=entry, candidate=entry) for entry in entries])["fc"]

    assert terms.count == 64
    assert terms.norm == pytest.approx(np.sqrt(32 * 9.0 + 32 * 16.0))


def test_sites_in_another_dtype_are_said(compared: Compared) -> None:
    comparison = compared(at(("forward", "", "fc", "output[0]"), lambda x: x.astype(np.float16)))

    assert comparison.verdict == "equivalent"
    assert (
        "1 site is float32 in the baseline and float16 in the candidate, first forward of fc output[0]; floors follow "
        "the shorter of the two."
    ) in comparison.notes


def test_a_finding_at_a_site_of_another_dtype_names_both(compared: Compared) -> None:
    comparison = compared(at(("forward", "", "fc", "output[0]"), lambda x: (x * 1.1).astype(np.float16)))

    assert comparison.first_divergence is not None
    assert comparison.first_divergence.message.endswith(" It is float32 in the baseline and float16 in the candidate.")


def _gradient_of(path: str, values: np.ndarray, *, stage: str = "", phase: str = "grad") -> Pair:
    entry = MergedSite(
        key=SiteKey(phase, stage, path, "grad"), order=0, dtype="float32", shape=values.shape,
        summary=summary_of(values),
    )  # fmt: skip
    return Pair(baseline=entry, candidate=entry)


@pytest.mark.parametrize("shape", [(8, 4), (8, 2, 2)])
def test_the_terms_of_a_backward_pass_that_was_not_observed_follow_from_the_gradient_of_the_weight(
    shape: tuple[int, ...],
) -> None:
    """Each output sums as many terms as it has inputs, of unit size."""
    terms = terms_by_module([_gradient_of("fc.weight", np.full(shape, 3.0, dtype=np.float32))])

    assert (terms["fc"].count, terms["fc"].summed) == (8, 0.0)
    assert terms["fc"].norm == pytest.approx(3.0 * np.sqrt(32) / 2)


@pytest.mark.parametrize(
    "pair",
    [
        _gradient_of("fc.bias", random(8, 4, seed=0)),
        _gradient_of("fc.weight", random(8, seed=0)),
        _gradient_of("fc.weight", random(0, 4, seed=0)),
        _gradient_of("fc.weight", random(4, 0, seed=0)),
        _gradient_of("fc.weight", random(8, 4, seed=0), stage="reduced"),
        _gradient_of("fc.weight", random(8, 4, seed=0), phase="update"),
    ],
    ids=["no weight", "a vector", "no outputs", "no inputs", "of a stage", "no gradient"],
)
def test_other_sites_tell_nothing_of_terms(pair: Pair) -> None:
    assert terms_by_module([pair]) == {}
