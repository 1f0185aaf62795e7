"""What ranks hold of a tensor makes a whole, or it is said why that is not known."""

from __future__ import annotations

import pytest

from tests.analyse.merge.test_step_table import only, part
from tests.made_up import random, summary_of
from traindiff.analyse.merge.step_table import gap
from traindiff.core.shards import OPEN, Shard

VALUES = random(4, 6, seed=0)


def box(first: int, length: int, *, of: int = 6, rows: int = 4) -> Shard:
    """Some columns of a batched tensor."""
    return Shard(shape=(rows, length), global_shape=(OPEN, of), offset=(0, first))


def test_columns_on_two_ranks_merge_to_the_whole() -> None:
    parts = [part(VALUES[:, :3], shard=box(0, 3)), part(VALUES[:, 3:], rank=1, shard=box(3, 3))]

    entry = only(parts)

    assert not entry.unobserved
    assert entry.shape == (4, 6)
    assert entry.summary["fingerprint"] == summary_of(VALUES, Shard.of_batch((4, 6), first=0))["fingerprint"]


@pytest.mark.parametrize(
    ("shards", "reason"),
    [
        ((box(0, 3), box(0, 2)), "its shards leave 4 of its 24 elements out"),
        ((box(0, 4), box(3, 3)), "its shards overlap in 4 of its 24 elements"),
        ((box(0, 3, of=6), box(3, 4, of=8)), "ranks disagree on the shape of the whole: [6] or [8]"),
    ],
)
def test_shards_that_make_no_whole_are_named(shards: tuple[Shard, Shard], reason: str) -> None:
    parts = [part(random(*shard.shape, seed=rank), rank=rank, shard=shard) for rank, shard in enumerate(shards)]

    assert only(parts).unobserved.startswith(reason)


def rows(first: int, count: int, spacing: tuple[int, int] | None = None) -> Shard:
    return Shard.of_batch((count, 6), first=first, spacing=spacing)


GAPS = "its rows leave gaps (batches differ in size, or one was not seen), so their places are not known"
OVERLAP = "rows of batches of different sizes overlap, so which sample is which is not known"


@pytest.mark.parametrize(
    ("shards", "why"),
    [
        ((rows(0, 2), rows(3, 2)), GAPS),
        ((rows(1, 2), rows(3, 2)), GAPS),
        ((rows(0, 3), rows(2, 2)), OVERLAP),
        ((rows(0, 4, (2, 4)), rows(6, 2)), GAPS),
        ((rows(0, 4, (2, 4)), rows(1, 2)), OVERLAP),
    ],
)
def test_rows_of_ranks_that_make_no_batch_are_named(shards: tuple[Shard, Shard], why: str) -> None:
    parts = [part(random(*shard.shape, seed=rank), rank=rank, shard=shard) for rank, shard in enumerate(shards)]

    assert only(parts).unobserved == why


@pytest.mark.parametrize(
    "shards",
    [
        (rows(0, 2), rows(2, 3)),
        (rows(0, 0), rows(0, 4)),
        (rows(0, 4, (2, 4)), rows(2, 4, (2, 4))),
        (rows(0, 3, (1, 2)), rows(1, 3, (1, 2))),
    ],
)
def test_rows_of_ranks_that_make_a_batch_are_known(shards: tuple[Shard, Shard]) -> None:
    parts = [part(random(*shard.shape, seed=rank), rank=rank, shard=shard) for rank, shard in enumerate(shards)]

    assert only(parts).unobserved == ""
    assert only(parts).shape == (sum(shard.shape[0] for shard in shards), 6)


def test_different_values_at_one_place_are_unknown_unless_they_are_known_as_copies() -> None:
    shard = Shard.of_batch((4, 6), first=0)
    first, second = VALUES, VALUES * 2
    terms = [part(first, shard=shard, term=1), part(second, rank=1, shard=shard, term=2)]
    copies = [part(first, shard=shard), part(second, rank=1, shard=shard)]

    assert "declare its batch axis with record(batch_axis=" in only(terms).unobserved
    assert not only(copies).unobserved
    assert only(copies).apart == ((0,), (1,))
    assert only(copies).summary == summary_of(second, shard)  # what is judged is what most ranks do not hold


def test_equal_values_whose_place_is_unknown_are_copies() -> None:
    shard = Shard.of_batch((4, 6), first=0)

    assert not only([part(VALUES, shard=shard, term=rank, rank=rank) for rank in range(2)]).unobserved


def test_copies_of_a_term_of_a_loss_must_agree() -> None:
    site = ("loss", "", "loss", "backward")
    parts = [
        part(random(1, seed=rank).reshape(()), site=site, rank=rank, merge="sum", shard=Shard.whole(()))
        for rank in range(2)
    ]

    assert only(parts).unobserved == "ranks hold different values of it, and how these combine is not known"


def test_rows_in_too_many_places_are_not_looked_at_one_by_one() -> None:
    """Two ranks that have every second row: more than a million places of one row each."""
    spaced = [rows(first, 600_000, (1, 2)) for first in range(2)]

    assert gap((1_200_000, 6), spaced) == "its rows lie in more than 1,048,576 places"
