"""Regions after views and permutations against those of real tensors."""

from __future__ import annotations

import pytest
import torch

from traindiff.core.shards import Region
from traindiff.observe.torch.sharding.provenance import permuted, viewed


def elements(region: Region) -> torch.Tensor:
    """Which elements of the whole a local tensor holds, by their numbers."""
    whole = torch.arange(torch.Size(region.shape).numel()).reshape(region.shape)
    for dim, ranges in enumerate(region.ranges):
        index = torch.cat([torch.arange(first, first + count) for first, count in ranges])
        whole = whole.index_select(dim, index)
    return whole


@pytest.mark.parametrize(
    ("region", "shape"),
    [
        (Region.whole((4, 6, 8)).cut(2, size=2, index=1), (4, 6, 2, 2)),  # heads
        (Region.whole((4, 6, 8)).cut(2, size=2, index=1), (24, 4)),
        (Region.whole((4, 6, 8)).cut(1, size=2, index=1), (12, 8)),  # tokens of several samples
        (Region.whole((2, 4, 6, 2)).cut(2, size=3, index=1), (2, 4, 4)),
        (Region.whole((2, 12)).cut(1, size=2, index=1, blocks=3), (2, 3, 2)),
        (Region.whole((4, 6)), (2, 2, 6)),
        (Region.whole((4, 6)).cut(0, size=2, index=1), (2, 6, 1)),
        (Region.whole((1, 4, 6)).cut(2, size=2, index=1), (4, 3)),
    ],
)
def test_a_view_lies_where_its_elements_do(region: Region, shape: tuple[int, ...]) -> None:
    found = viewed(region, shape)

    assert found is not None
    assert found.local_shape == shape
    assert torch.equal(elements(found).flatten(), elements(region).flatten())


@pytest.mark.parametrize(
    ("region", "shape"),
    [
        (Region.whole((4, 6)).cut(1, size=2, index=1), (4, 1, 3)),
        (Region.whole((4, 10)).cut(1, size=2, index=1), (2, 10)),
        (Region.whole((1024, 6)).cut(1, size=2, index=1), (3072,)),
    ],
)
def test_a_view_that_is_no_product_of_ranges_has_no_place_or_the_right_one(
    region: Region, shape: tuple[int, ...]
) -> None:
    found = viewed(region, shape)

    assert found is None or torch.equal(elements(found).flatten(), elements(region).flatten())


def test_a_permutation_lies_where_its_elements_do() -> None:
    region = Region.whole((2, 6, 4)).cut(1, size=2, index=1)
    whole = torch.arange(48).reshape(2, 6, 4).permute(2, 0, 1)
    found = permuted(region, (2, 0, 1))

    assert torch.equal(whole[:, :, 3:], whole.index_select(2, torch.arange(*_ends(found.ranges[2]))))
    assert found.shape == (4, 2, 6)


def _ends(ranges: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    ((first, count),) = ranges
    return first, first + count
