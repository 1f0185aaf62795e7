"""What is known of gradients beyond their size: the terms they are sums of, and the parts that are noise."""

from __future__ import annotations

import numpy as np
import pytest

from tests.made_up import Compared, at, random, summary_of
from traindiff.analyse.merge.distance import Pair
from traindiff.analyse.merge.site import MergedSite, SiteKey
from traindiff.analyse.noise.gradients import share_of_noise, terms_by_module


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
