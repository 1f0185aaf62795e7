"""A judge of two runs: NaN that counts by itself, tolerances of the user, the words of sites."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests.analyse.noise.test_site_floors import site
from tests.made_up import FC, HEAD, Array, Compared, Step, both, random, record, scaled
from traindiff.analyse.align.side import step_pairs
from traindiff.analyse.align.two_runs import TwoRuns
from traindiff.analyse.compare.incremental import RunningComparison
from traindiff.analyse.compare.judge import Judge
from traindiff.analyse.merge.renames import parse_renames
from traindiff.analyse.merge.run_steps import run_steps
from traindiff.analyse.noise.tolerance import Tolerance, TolerancesByPhase
from traindiff.core.steps import ALL_STEPS
from traindiff.storage import open_recording

BY_PHASE = TolerancesByPhase(phases={"forward": 0.1})
X = random(4, 6, seed=0)


def spoiled(value: float) -> Array:
    values = X.copy()
    values[1, 2] = value
    return values


@pytest.mark.parametrize("side", ["baseline", "candidate", "both"])
@pytest.mark.parametrize(
    ("phase", "value", "broken"),
    [
        ("forward", math.nan, True),
        ("forward", math.inf, False),  # masks are infinite on purpose
        ("forward", -math.inf, False),
        ("backward", math.nan, True),
        ("backward", -math.inf, False),
        ("grad", math.nan, True),
        ("grad", math.inf, True),
        ("grad", -math.inf, True),
        ("loss", math.inf, True),
        ("grad", 1e30, False),
    ],
)
def test_with_tolerances_by_phase_nan_is_a_finding_by_itself(phase: str, value: float, broken: bool, side: str) -> None:
    wrong = spoiled(value)
    pair = site(X if side == "candidate" else wrong, X if side == "baseline" else wrong, phase=phase)

    assert Judge(BY_PHASE).is_broken(pair) == broken
    assert not Judge(Tolerance(rtol=0.1, atol=0.0)).is_broken(pair)
    assert not Judge(None).is_broken(pair)
    if broken:
        assert Judge(BY_PHASE).size(pair) == math.inf


def test_a_tolerance_of_the_user_takes_the_place_of_a_floor() -> None:
    forward, gradient = site(X), site(X, phase="grad")
    counter = site(np.array(1.0), phase="optimizer", slot="step")

    assert [Judge(BY_PHASE).floor(one, 0.5) for one in (forward, gradient, counter)] == [0.1, 0.5, 0.5]
    assert [Judge(BY_PHASE).is_judged_by_user(one) for one in (forward, gradient, counter)] == [True, False, False]
    everything = Judge(Tolerance(rtol=0.0, atol=0.0))
    assert [everything.floor(one, 0.5) for one in (forward, gradient, counter)] == [0.0, 0.0, 0.5]
    assert [everything.is_judged_by_user(one) for one in (forward, gradient, counter)] == [True, True, False]
    assert not Judge(None).is_judged_by_user(forward)


def test_where_every_bit_counts_the_first_site_is_above_and_the_others_follow(compared: Compared) -> None:
    found = compared(both(scaled(FC, 2e-7), scaled(HEAD, 2e-7)), identical=True)

    assert (found.verdict, len(found.findings)) == ("diverged", 1)
    rows = {(one.phase, one.path): one for one in found.differences if one.phase == "forward"}
    first, later = rows["forward", "fc"], rows["forward", "head"]
    assert (first.word, first.floor, first.undisturbed) == ("above", 0.0, 0.0)
    assert (later.word, later.undisturbed) == ("follows", 0.0)
    assert later.floor > later.difference > 0.0


@pytest.mark.parametrize(("count", "said"), [(1, "1 of 40 elements is"), (2, "2 of 40 elements are")])
def test_nan_in_both_runs_is_a_finding_of_its_own_with_tolerances_by_phase(
    count: int, said: str, tmp_path: Path
) -> None:
    def edit(_step: int, sites: Step) -> None:
        sites[FC].values.reshape(-1)[:count] = np.nan

    runs = [open_recording(str(record(tmp_path / name, edit, steps=1))) for name in "bc"]
    renames = parse_renames(())
    running = RunningComparison(TwoRuns((runs[0], runs[1]), renames, ALL_STEPS), tolerance=BY_PHASE)
    for sides in step_pairs(*map(run_steps, runs)):
        running.feed(*sides)

    first = running.result().first_divergence

    assert first is not None
    assert (first.kind, first.path, first.difference) == ("non-finite", "fc", math.inf)
    assert first.message.startswith(f"{said} NaN or infinite, at the same places in both runs.")
