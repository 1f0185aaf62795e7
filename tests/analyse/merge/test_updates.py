"""Updates and the gradient norm follow from what was recorded."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.made_up import Array, Compared, Seen, Step, at, observed, plain_step, random, record
from traindiff.analyse.align.side import gradient_norms
from traindiff.analyse.compare import compare
from traindiff.analyse.merge.distance import Pair, difference
from traindiff.analyse.merge.parameters import Updates
from traindiff.analyse.merge.site import GRADIENT_NORM, MergedSite
from traindiff.analyse.merge.step_table import step_table
from traindiff.core.observation import EDITED
from traindiff.core.shards import Shard
from traindiff.core.summary import norm


def table_of(step: int, sites: Step) -> dict[object, MergedSite]:
    parts = [observed(site, seen, step=step, order=order) for order, (site, seen) in enumerate(sites.items())]
    return step_table((seen, 0, summary) for seen, summary in parts)  # type: ignore[return-value]


def divided(sites: Step, ranks: int) -> dict[Any, MergedSite]:
    """The table of sites of which each rank holds some rows."""
    parts = []
    for order, (site, seen) in enumerate(sites.items()):
        first = 0
        for rank, rows in enumerate(np.array_split(seen.values, ranks)):
            offset = (first, *[0] * (seen.values.ndim - 1))
            shard = Shard(shape=rows.shape, global_shape=seen.values.shape, offset=offset)
            one, summary = observed(site, Seen(values=rows, about={"shard": shard}), step=0, order=order)
            parts.append((one, rank, summary))
            first += len(rows)
    return dict(step_table(parts))


def parameter(values: Array, stage: str = "") -> Step:
    return {("param", stage, "w", "value"): Seen(values=values)}


def test_an_update_is_the_parameter_after_minus_before() -> None:
    before, after = random(50, 40, seed=0), random(50, 40, seed=1)
    found, parameters = Updates().derive(table_of(0, {**parameter(before, "before"), **parameter(after)}), step=0)  # type: ignore[arg-type]

    assert [entry.key.phase for entry in found] == ["update"]
    assert norm(found[0].summary) == pytest.approx(np.linalg.norm(after - before), rel=0.4)
    assert norm(parameters["w"].summary) == pytest.approx(np.linalg.norm(before))


def test_of_a_parameter_that_was_recorded_in_part_no_update_is_known() -> None:
    updates = Updates()
    whole = table_of(0, parameter(random(9, seed=0)))
    part = {key: replace(entry, unobserved="a rank is missing") for key, entry in whole.items()}

    assert not updates.derive(whole, step=0)[0]  # type: ignore[arg-type]
    assert not updates.derive(part, step=1)[0]  # type: ignore[arg-type]
    found, before = updates.derive(whole, step=2)  # type: ignore[arg-type]

    assert not found
    assert not before


def test_the_next_update_starts_where_the_last_step_ended() -> None:
    updates = Updates()
    updates.derive(table_of(0, {**parameter(random(9, seed=0), "before"), **parameter(random(9, seed=1))}), step=0)  # type: ignore[arg-type]
    found, _ = updates.derive(table_of(1, parameter(random(9, seed=1))), step=1)  # type: ignore[arg-type]

    assert norm(found[0].summary) == 0.0


def test_without_a_parameter_before_there_is_no_update() -> None:
    assert Updates().derive(table_of(4, parameter(random(9, seed=0))), step=4)[0] == []  # type: ignore[arg-type]


def test_a_parameter_that_keeps_its_bits_has_an_update_of_exactly_zero() -> None:
    values = random(1000, seed=0) * np.float32(1e6)
    found, _ = Updates().derive(table_of(0, {**parameter(values, "before"), **parameter(values)}), step=0)  # type: ignore[arg-type]

    assert not found[0].summary["sketch"].any()


def test_the_gradient_norm_is_that_of_all_parameters() -> None:
    sites = plain_step(0)
    pairs = [Pair(baseline=entry, candidate=entry) for entry in table_of(0, sites).values()]
    (both,) = gradient_norms(pairs)
    expected = math.sqrt(
        sum(float(np.square(s.values, dtype=float).sum()) for site, s in sites.items() if site[0] == "grad")
    )

    assert both.baseline.key == GRADIENT_NORM
    assert norm(both.baseline.summary) == pytest.approx(expected, rel=1e-6)


def doubles(seed: int) -> Array:
    return random(40, 50, seed=seed, dtype="float64")


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_norms_and_updates_of_equal_bits_are_equal_however_ranks_divide_them(ranks: int) -> None:
    gradients: Step = {("grad", "", f"w{n}", "grad"): Seen(values=doubles(n)) for n in range(8)}
    sites = {**gradients, **parameter(doubles(8), "before"), **parameter(doubles(9))}
    other = {**sites, ("grad", "", "w3", "grad"): Seen(values=doubles(3) * (1.0 + 1e-6))}
    whole = divided(sites, 1)

    def derived(candidate: dict[Any, MergedSite]) -> list[Pair]:
        pairs = [Pair(baseline=whole[key], candidate=candidate[key]) for key in whole]
        updates = [Updates().derive(table, step=0)[0] for table in (whole, candidate)]
        return [*gradient_norms(pairs), *starmap(_pair, zip(*updates, strict=True))]

    norms, update = derived(divided(sites, ranks))
    assert (difference(norms), difference(update)) == (0.0, 0.0)
    unknown = _pair(update.baseline, replace(update.candidate, origin=()))
    assert 0.0 < (difference(unknown) or 0.0) < 1e-12  # sums over shards round otherwise
    norms, update = derived(divided(other, ranks))
    assert ((difference(norms) or 0.0) > 1e-8, difference(update)) == (True, 0.0)


def _pair(baseline: MergedSite, candidate: MergedSite) -> Pair:
    return Pair(baseline=baseline, candidate=candidate)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_norm_of_gradients_that_are_not_finite_is_nan(value: float) -> None:
    sites = plain_step(0)
    sites["grad", "", "fc.bias", "grad"].values[0] = value
    (both,) = gradient_norms([Pair(baseline=e, candidate=e) for e in table_of(0, sites).values()])

    assert both.baseline.summary["nan"] == 1


def test_without_gradients_there_is_no_norm() -> None:
    assert gradient_norms([]) == []


def test_the_norm_is_of_the_gradients_that_both_runs_have(tmp_path: Path) -> None:
    def fewer(_step: int, sites: Step) -> None:
        del sites["grad", "", "fc.weight", "grad"]

    candidate = record(tmp_path / "c", fewer, content={"modules": {}, "parameters": {"fc.bias": {}}, "optimizers": []})
    comparison = compare(record(tmp_path / "b"), candidate)

    assert "norm" not in {finding.slot for finding in comparison.findings}


def test_an_update_that_did_not_happen_is_named(compared: Compared) -> None:
    stale = random(8, 6, seed=7)
    comparison = compared(at(("param", "", "fc.weight", "value"), lambda _: stale))

    first = comparison.first_divergence
    assert first is not None
    assert (first.phase, first.path, first.kind, first.step) == ("update", "fc.weight", "never-updated", 0)
    assert first.message == "The candidate's step did not change this parameter; the baseline's did."


def test_an_update_over_steps_that_were_not_recorded_is_not_derived() -> None:
    updates = Updates()
    updates.derive(table_of(0, {**parameter(random(9, seed=0), "before"), **parameter(random(9, seed=1))}), step=0)  # type: ignore[arg-type]

    assert updates.derive(table_of(2, parameter(random(9, seed=2))), step=2)[0] == []  # type: ignore[arg-type]


def test_an_update_over_a_step_of_another_optimizer_that_was_not_recorded_is_not_derived() -> None:
    updates = Updates()
    updates.derive(table_of(0, parameter(random(9, seed=0), "before")), step=0)  # type: ignore[arg-type]
    found, _ = updates.derive(table_of(1, parameter(random(9, seed=1))), step=1)  # type: ignore[arg-type]

    assert found == []


def test_an_edit_on_a_rank_whose_copy_does_not_count_is_no_part_of_the_update() -> None:
    """The ranks hold different copies from then on, and the update is that of the first one."""
    before, moved = random(9, seed=0), random(9, seed=0) + np.float32(0.25)
    edited, after = before + np.float32(1.0), {0: moved, 1: moved + np.float32(1.0)}
    updates = Updates()
    updates.derive(table_of(0, parameter(before)), step=0)  # type: ignore[arg-type]
    ones = [(0, 0, "", after[0]), (1, 0, EDITED, edited), (1, 1, "", after[1])]
    parts = [
        (one, rank, summary)
        for rank, order, stage, values in ones
        for one, summary in [observed(("param", stage, "w", "value"), Seen(values=values), step=1, order=order)]
    ]

    found, parameters = updates.derive(dict(step_table(parts)), step=1)

    assert float(found[0].summary["sum"]) == pytest.approx(9 * 0.25, rel=1e-5)
    assert float(parameters["w"].summary["sum"]) == pytest.approx(float(edited.sum()), rel=1e-5)
