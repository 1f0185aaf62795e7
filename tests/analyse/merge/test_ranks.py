"""A difference is put down to the ranks that hold it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.analyse.merge.test_step_table import only, part, random
from traindiff.analyse.align.exact import check_initial_parameter
from traindiff.analyse.findings import ranks_text
from traindiff.analyse.merge.distance import Pair, differing_ranks
from traindiff.analyse.merge.site import MergedSite, only_rank
from traindiff.core.shards import Shard

ROWS, COLUMNS = 64, 6
PARAMETER = ("param", "", "fc.weight", "value")


def sharded(values: NDArray[np.float32], cuts: Mapping[int, tuple[int, int]]) -> MergedSite:
    """Rows of a matrix on several ranks."""
    width = values.shape[1]
    return only([
        part(
            values[first:last], rank=rank, site=PARAMETER,
            shard=Shard(shape=(last - first, width), global_shape=values.shape, offset=(first, 0)),
        )
        for rank, (first, last) in cuts.items()
    ])  # fmt: skip


def flat(values: NDArray[np.float32], cuts: Mapping[int, tuple[int, int]]) -> MergedSite:
    """Flat ranges of a matrix on several ranks, as FSDP's flat parameters and ZeRO cut them."""
    return only([
        part(
            values.reshape(-1)[first:last], rank=rank, site=PARAMETER,
            shard=Shard(shape=(last - first,), global_shape=values.shape, offset=(first,)),
        )
        for rank, (first, last) in cuts.items()
    ])  # fmt: skip


@pytest.fixture
def values() -> NDArray[np.float32]:
    return random(ROWS, COLUMNS, seed=0)


QUARTERS = {rank: (16 * rank, 16 * rank + 16) for rank in range(4)}


def test_a_parameter_that_starts_otherwise_on_one_rank_only_is_put_down_to_it(values: NDArray[np.float32]) -> None:
    wrong = values.copy()
    wrong[20, 3] += 1.0
    pair = Pair(baseline=sharded(values, {0: (0, ROWS)}), candidate=sharded(wrong, QUARTERS))

    finding = check_initial_parameter(pair, step=0)

    assert finding is not None
    assert finding.message.startswith("fc.weight starts with other values")
    assert finding.message.endswith("Only what rank 1 holds differs.")


def test_runs_that_are_cut_alike_are_compared_part_by_part(values: NDArray[np.float32]) -> None:
    wrong = values.copy()
    wrong[16:40] += 1.0

    pair = Pair(baseline=sharded(values, QUARTERS), candidate=sharded(wrong, QUARTERS))

    assert differing_ranks(pair, 1e-6) == (1, 2)


def test_parts_on_other_ranks_are_still_the_same_parts(values: NDArray[np.float32]) -> None:
    wrong = values.copy()
    wrong[:16] += 1.0
    moved = {3 - rank: cut for rank, cut in QUARTERS.items()}

    pair = Pair(baseline=sharded(values, QUARTERS), candidate=sharded(wrong, moved))

    assert differing_ranks(pair, 1e-6) == (3,)


@pytest.mark.parametrize("layout", ["boxes", "flat ranges"])
def test_rows_tell_the_rank_where_the_baseline_is_whole(values: NDArray[np.float32], layout: str) -> None:
    wrong = values.copy()
    wrong[33:36] += 1.0
    if layout == "boxes":
        candidate = sharded(wrong, QUARTERS)
    else:
        candidate = flat(wrong, {rank: (first * COLUMNS, last * COLUMNS) for rank, (first, last) in QUARTERS.items()})

    pair = Pair(baseline=only([part(values, site=PARAMETER)]), candidate=candidate)

    assert differing_ranks(pair, 1e-6) == (2,)


def test_a_difference_on_all_ranks_is_put_down_to_none(values: NDArray[np.float32]) -> None:
    whole = only([part(values, site=PARAMETER)])

    assert differing_ranks(Pair(baseline=whole, candidate=sharded(values * 2, QUARTERS)), 1e-6) == ()
    assert (
        differing_ranks(Pair(baseline=sharded(values, QUARTERS), candidate=sharded(values * 2, QUARTERS)), 1e-6) == ()
    )


def test_of_one_process_nothing_is_said(values: NDArray[np.float32]) -> None:
    whole = only([part(values)])

    assert differing_ranks(Pair(baseline=whole, candidate=only([part(values + 1)])), 1e-6) == ()
    assert only_rank(whole) == 0
    assert only_rank(sharded(values, QUARTERS)) is None


def test_ranks_are_named_in_words() -> None:
    assert ranks_text([1]) == "Rank 1"
    assert ranks_text([0, 2, 3], capital=False) == "ranks 0, 2 and 3"
    assert ranks_text(range(10)) == "Ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


def copies(*seeds: int) -> MergedSite:
    """A parameter of which each rank holds a copy; equal seeds are equal copies."""
    return only([part(random(4, 3, seed=seed), rank=rank, site=PARAMETER) for rank, seed in enumerate(seeds)])


@pytest.mark.parametrize(
    ("seeds", "ranks"), [((0, 1, 0), (1,)), ((0, 1), ()), ((0, 0, 0, 1, 2), (3, 4)), ((0, 0, 1, 1), ())]
)
def test_of_copies_that_disagree_those_outside_the_largest_group_differ(
    seeds: tuple[int, ...], ranks: tuple[int, ...]
) -> None:
    assert differing_ranks(Pair(baseline=copies(0), candidate=copies(*seeds)), 1e-6) == ranks


@pytest.mark.parametrize(
    ("wrong", "ranks"), [(slice(16, 17), (1,)), (slice(0, 16), (0,)), (slice(40, 60), ()), (slice(15, 17), ())]
)
def test_elements_of_a_vector_tell_the_rank_where_the_baseline_is_whole(wrong: slice, ranks: tuple[int, ...]) -> None:
    values = random(64, seed=0)
    other = values.copy()
    other[wrong] += 1.0
    site = ("param", "", "fc.bias", "value")
    candidate = only([
        part(other[first:last], rank=rank, site=site, shard=Shard(shape=(16,), global_shape=(64,), offset=(first,)))
        for rank, (first, last) in QUARTERS.items()
    ])  # fmt: skip

    assert differing_ranks(Pair(baseline=only([part(values, site=site)]), candidate=candidate), 1e-6) == ranks


@pytest.mark.parametrize("reason", ["unobserved", "batched", "summed"])
def test_rows_of_the_batch_terms_and_what_was_not_observed_tell_no_rank(
    reason: str, values: NDArray[np.float32]
) -> None:
    wrong = values.copy()
    wrong[20, 3] += 1.0
    about = {"unobserved": "sparse"} if reason == "unobserved" else {reason: True}
    candidate = replace(sharded(wrong, QUARTERS), **about)

    assert differing_ranks(Pair(baseline=only([part(values, site=PARAMETER)]), candidate=candidate), 1e-6) == ()


def test_a_part_that_is_not_finite_outweighs_no_other(values: NDArray[np.float32]) -> None:
    wrong = values.copy()
    wrong[20, 3] = np.nan
    wrong[40, 3] += 1.0

    pair = Pair(baseline=sharded(values, QUARTERS), candidate=sharded(wrong, QUARTERS))

    assert differing_ranks(pair, 1e-6) == (1, 2)


def test_a_much_smaller_difference_is_what_follows_from_the_other(values: NDArray[np.float32]) -> None:
    wrong = values.copy()
    wrong[20, 3] += 10.0
    wrong[40, 3] += 0.1

    assert differing_ranks(Pair(baseline=sharded(values, QUARTERS), candidate=sharded(wrong, QUARTERS)), 1e-6) == (1,)
