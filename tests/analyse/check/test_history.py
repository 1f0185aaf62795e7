"""What a check keeps of every step, for a report."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from tests.made_up import FC, Step, at, record
from traindiff.analyse.check import check
from traindiff.analyse.merge.history import RunHistory
from traindiff.analyse.merge.site import SiteKey
from traindiff.core.observation import ALL_GRADIENTS
from traindiff.core.summary import norm
from traindiff.storage import open_recording

FC_KEY = SiteKey(*FC)


def history_of(path: Path) -> RunHistory:
    history = check(path, history=True).history
    assert history is not None
    return history


def test_a_check_keeps_every_size_only_when_asked(tmp_path: Path) -> None:
    path = record(tmp_path / "run")

    assert check(path).history is None
    assert check(path, history=True) == check(path)


def test_each_site_has_its_norm_in_each_step(tmp_path: Path) -> None:
    path = record(tmp_path / "run")
    history = history_of(path)
    recorded = [
        float(norm(summary))
        for step in open_recording(str(path)).steps(0)
        for seen, summary in zip(step.observations, step.summaries, strict=True)
        if (seen.phase, seen.path) == ("forward", "fc")
    ]

    assert np.allclose(history.whole.of("size")[history.whole.sites[FC_KEY]], recorded)
    assert all(key.path != "rng" for key in history.whole.sites)


def test_the_norm_of_all_gradients_is_one_more_site(tmp_path: Path) -> None:
    history = history_of(record(tmp_path / "run"))
    sites = history.whole.sites
    own = [row for key, row in sites.items() if key.phase == "grad" and key.path != ALL_GRADIENTS]
    sizes = history.whole.of("size")

    np.testing.assert_allclose(
        sizes[sites[SiteKey("grad", "", ALL_GRADIENTS, "norm")]], np.sqrt((sizes[own] ** 2).sum(axis=0)), rtol=1e-5
    )


def test_a_site_that_is_not_finite_is_kept_where_it_first_is_not(tmp_path: Path) -> None:
    def broken(step: int, sites: Step) -> None:
        if step:
            at(FC, lambda values: values * np.float32(np.nan))(step, sites)

    history = history_of(record(tmp_path / "run", broken))

    assert (history.extremes[FC_KEY].step, history.extremes[FC_KEY].size) == (1, math.inf)
    assert history.whole.of("nonfinite")[history.whole.sites[FC_KEY]].tolist() == [0, 1, 1]
