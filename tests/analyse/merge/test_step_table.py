"""Merging the observations of a step over micro-steps and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.made_up import Array, Seen, Step, observed, random, record, summary_of
from traindiff.analyse.compare import compare
from traindiff.analyse.merge.site import MergedSite, Part
from traindiff.analyse.merge.step_table import step_table
from traindiff.core.shards import Shard
from traindiff.core.summary import norm

SITE = ("forward", "", "fc", "output[0]")


def part(values: Array, *, rank: int = 0, order: int = 0, site: tuple[str, str, str, str] = SITE, **about: Any) -> Part:
    observation, summary = observed(site, Seen(values=values, about=about), step=0, order=order)
    return observation, rank, summary


def only(parts: list[Part]) -> MergedSite:
    (entry,) = step_table(parts).values()
    return entry


def test_one_observation_stays_as_it_is() -> None:
    values = random(3, 4, seed=0)
    entry = only([part(values)])

    assert entry.shape == (3, 4)
    assert entry.exact
    assert entry.summary == summary_of(values)


@pytest.mark.parametrize("sizes", [(5,), (2, 3), (1, 1, 3), (0, 5)])
def test_micro_batches_merge_to_the_batch(sizes: tuple[int, ...]) -> None:
    values = random(5, 6, seed=0)
    parts, first = [], 0
    for micro_step, rows in enumerate(sizes):
        shard = Shard.of_batch((rows, 6), first=first)
        parts.append(part(values[first : first + rows], micro_step=micro_step, shard=shard, order=micro_step))
        first += rows
    entry = only(parts)

    assert entry.shape == (5, 6)
    assert entry.exact
    assert entry.key.micro_step == 0
    assert entry.summary["fingerprint"] == summary_of(values, Shard.of_batch((5, 6), first=0))["fingerprint"]


def test_batches_on_two_ranks_merge_in_whatever_order_they_come() -> None:
    values = random(4, 6, seed=0)
    parts = [
        part(values[2:], rank=1, shard=Shard.of_batch((2, 6), first=2)),
        part(values[:2], rank=0, shard=Shard.of_batch((2, 6), first=0)),
    ]

    assert only(parts).summary == only(parts[::-1]).summary
    assert [held.rank for held in only(parts).parts] == [0, 1]


@pytest.mark.parametrize("dtype", ["float32", "int64"])
def test_of_buffers_that_differ_between_ranks_the_odd_one_is_judged(dtype: str) -> None:
    """No rule says that they agree: a batch normalization has each rank's own statistics."""
    values = (10 * random(4, seed=0)).astype(dtype)
    site = ("param", "", "counter", "buffer")
    entry = only([part(values + (rank == 1), rank=rank, site=site) for rank in range(3)])

    assert entry.apart == ((0, 2), (1,))
    assert entry.summary == summary_of(values + 1)


def test_of_several_copies_that_differ_the_farthest_is_judged() -> None:
    values = random(4, seed=0)
    for near, far in ((1, 2), (2, 1)):
        away = {near: 0.5, far: 3.0}
        entry = only([
            part(values + np.float32(away.get(rank, 0.0)), rank=rank, site=("param", "", "counter", "buffer"))
            for rank in range(4)
        ])  # fmt: skip

        assert entry.apart == ((0, 3), (1,), (2,))
        assert entry.summary == summary_of(values + np.float32(3.0))


def test_sums_add_up_and_their_bits_are_unknown() -> None:
    terms = [random(3, 4, seed=seed) for seed in range(3)]
    entry = only([part(term, micro_step=step, merge="sum") for step, term in enumerate(terms)])

    assert not entry.exact
    assert norm(entry.summary) == pytest.approx(np.linalg.norm(sum(terms)), rel=0.4)
    assert entry.summary["sum"] == pytest.approx(float(np.sum(terms)), abs=1e-5)
    assert len(entry.parts) == 3


def test_a_sum_of_one_term_is_the_term() -> None:
    assert only([part(random(3, seed=0), merge="sum")]).exact


def test_means_are_weighted() -> None:
    losses = [
        part(np.array(value), merge="mean", weight=weight, micro_step=n)
        for n, (value, weight) in enumerate([(1.0, 3.0), (5.0, 1.0)])
    ]

    assert only(losses).summary["sum"] == 2.0
    assert not only(losses).exact


def test_a_mean_of_no_weight_is_zero_and_not_an_error() -> None:
    assert only([part(np.array(3.0), merge="mean", weight=0.0)]).summary["sum"] == 0.0


def test_a_tensor_that_every_micro_step_repeats_is_one_entry() -> None:
    values = random(3, 4, seed=0)

    assert only([part(values, micro_step=step) for step in range(3)]).key.micro_step == 0


def test_a_tensor_that_changes_between_micro_steps_is_one_entry_each() -> None:
    entries = step_table([part(random(3, 4, seed=step), micro_step=step) for step in range(3)])

    assert [key.micro_step for key in entries] == [0, 1, 2]


def test_replicas_of_a_parameter_are_one_entry() -> None:
    values = random(3, 4, seed=0)
    parts = [part(values, rank=rank, site=("param", "", "fc.weight", "value")) for rank in range(2)]

    assert only(parts).summary == summary_of(values)


def test_one_unobserved_part_makes_the_whole_unobserved() -> None:
    entry = only([part(random(3, seed=0)), part(random(3, seed=0), micro_step=1, unobserved="sparse")])

    assert entry.unobserved == "sparse"
    assert entry.summary["count"] == 0


def test_calls_and_slots_stay_apart_and_in_execution_order() -> None:
    parts = [
        part(random(3, seed=0), order=5, call=1),
        part(random(3, seed=0), order=2),
        part(random(3, seed=0), order=3, site=("forward", "", "fc", "output[1]")),
    ]

    assert [(key.slot, key.call) for key in step_table(parts)] == [("output[0]", 0), ("output[1]", 0), ("output[0]", 1)]


def test_a_step_without_observations_is_an_empty_table() -> None:
    assert step_table([]) == {}


def test_a_logged_norm_is_judged_after_the_gradients_that_it_is_of(tmp_path: Path) -> None:
    def logged(_step: int, sites: Step) -> None:
        rest = {site: sites.pop(site) for site in list(sites) if site[0] in ("grad", "optimizer", "param")}
        total = float(np.sqrt(sum(np.square(seen.values).sum() for site, seen in rest.items() if site[0] == "grad")))
        sites["loss", "", "grad_norm", "logged"] = Seen(values=np.array(total), about={"merge": "mean"})
        sites.update(rest)

    def wrong(step: int, sites: Step) -> None:
        if step == 1:
            sites["grad", "", "fc.weight", "grad"].values *= 2
        logged(step, sites)

    comparison = compare(record(tmp_path / "b", logged), record(tmp_path / "c", wrong))

    assert comparison.first_divergence is not None
    assert (comparison.first_divergence.phase, comparison.first_divergence.path) == ("grad", "fc.weight")
