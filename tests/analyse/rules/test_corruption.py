"""Bits that flip in a training are found at the step and the site, without another run."""

from __future__ import annotations

import pytest
import torch
from benchmarks.corruption import healthy_kinds, outcome, outcomes_on_ranks


@pytest.mark.parametrize("kind", ["parameter", "exp_avg", "exp_avg_sq"])
def test_any_bit_between_two_steps_is_found(kind: str) -> None:
    found = outcome(kind, 1, dtype=torch.float32, known=frozenset())

    assert found is not None
    assert found.at_step
    assert found.at_site


def test_a_bit_whose_change_is_less_than_the_roundings_of_all_elements_is_found_in_a_short_dtype() -> None:
    found = outcome("parameter", 4, dtype=torch.bfloat16, known=frozenset({"lost-update"}))

    assert found is not None
    assert found.flip.share < 0.0078  # two roundings
    assert found.at_step
    assert found.at_site


@pytest.mark.parametrize("kind", ["product", "gradient"])
def test_a_bit_that_changes_a_thousandth_of_the_tensor_is_found(kind: str) -> None:
    outcomes = (outcome(kind, seed, dtype=torch.float32, known=frozenset()) for seed in range(40))
    found = next(one for one in outcomes if one is not None and one.flip.share > 1e-3)

    assert found.at_step
    assert found.at_site


def test_without_a_flip_nothing_is_found() -> None:
    assert healthy_kinds(0, torch.float32) == frozenset()


def test_a_bit_that_flips_in_one_ranks_copy_of_a_reduced_gradient_is_found_in_its_step() -> None:
    (found,) = outcomes_on_ranks(("all-reduce, one copy",), 1, "float32")

    assert found.flip.rank is not None
    assert found.at_step
    assert found.at_site
