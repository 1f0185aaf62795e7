"""What a comparison keeps of every step, for a report."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from tests.made_up import FC, Compared, at, record, scaled
from traindiff.analyse.compare import compare
from traindiff.analyse.findings import SITE_WORDS
from traindiff.analyse.merge.history import DifferenceHistory
from traindiff.analyse.merge.site import SiteKey
from traindiff.core.summary import norm

FC_KEY = SiteKey("forward", "", "fc", "output[0]")
GRADIENT = ("grad", "", "fc.weight", "grad")


def test_a_comparison_keeps_every_difference_only_when_asked(compared: Compared) -> None:
    assert compared().history is None
    assert compared(history=True).history is not None


def test_what_is_kept_changes_nothing_of_the_result(tmp_path: Path) -> None:
    baseline, candidate = record(tmp_path / "b"), record(tmp_path / "c", scaled(FC, 1e-3, step=1))

    assert compare(baseline, candidate, history=True) == compare(baseline, candidate)


def test_each_step_has_its_difference_its_floor_and_both_sizes(compared: Compared) -> None:
    history = compared(scaled(FC, 1e-3, step=1), history=True).history
    assert isinstance(history, DifferenceHistory)
    row = history.whole.sites[FC_KEY]
    weight, difference, floor, baseline, candidate = (history.whole.of(name)[row] for name in history.whole.fields)

    assert history.whole.columns == [(0, 0), (1, 1), (2, 2)]
    assert [difference[0], difference[2]] == [0, 0]
    assert math.isclose(difference[1], 1e-3, rel_tol=0.3)
    assert [SITE_WORDS[int(one)] for one in weight] == ["identical", "above", "identical"]
    assert difference[1] > floor[1]
    np.testing.assert_allclose(candidate / baseline, [1, 1.001, 1], rtol=1e-5)


def test_a_site_is_kept_whole_where_it_is_farthest(compared: Compared) -> None:
    history = compared(scaled(FC, 0.5, step=2), history=True).history
    assert history is not None
    farthest = history.farthest[FC_KEY]

    assert farthest.step == 2
    assert farthest.shapes == ((5, 8), (5, 8))
    baseline, candidate = farthest.summaries
    assert math.isclose(float(norm(candidate)), 1.5 * float(norm(baseline)), rel_tol=1e-6)


def test_what_is_kept_of_a_site_keeps_nothing_else_of_its_step_in_memory(compared: Compared) -> None:
    history = compared(history=True).history
    assert history is not None

    for one in history.farthest.values():
        for summary in one.summaries:
            assert summary.base is None or summary.base.size == 1


def test_differences_are_kept_by_rank_where_the_runs_are_cut_alike(tmp_path: Path) -> None:
    paths = []
    for name, edit in (("b", None), ("c", at(GRADIENT, lambda values: values * 3, step=1))):
        for rank in range(2):
            path = record(
                tmp_path / name, edit if edit and rank == 1 else lambda step, sites: None, rank=rank,
                run={"world_size": 2},
            )  # fmt: skip
        paths.append(path)

    history = compare(*paths, history=True).history

    assert history is not None
    key = SiteKey(*GRADIENT)
    ratios = {rank: history.by_rank.of("ratio")[history.by_rank.sites[key, rank]].tolist() for rank in range(2)}
    assert ratios[0] == [0, 0, 0]
    assert ratios[1][0] == ratios[1][2] == 0
    assert ratios[1][1] > 1
