"""What traindiff failed to observe is unknown from there on."""

from __future__ import annotations

import numpy as np
import pytest

from tests.analyse.merge.test_step_table import part
from tests.made_up import Site, random
from traindiff.analyse.merge.site import Part
from traindiff.analyse.merge.step_table import step_table
from traindiff.analyse.merge.unobserved import FailedTaps, without_lost
from traindiff.core.observation import ITSELF, MAYBE_UNSEEN, TAP_FAILED, UNSEEN

SITES: list[Site] = [
    ("batch", "", "", "input[0]"),
    ("forward", "", "fc", "output[0]"),
    ("backward", "", "fc", "output[0]"),
    ("grad", "micro", "fc.weight", "grad"),
    ("grad", "", "fc.weight", "grad"),
    ("update", "", "fc.weight", "update"),
    ("param", "", "fc.weight", "value"),
]


def fault(tap: str, *, rank: int = 0, message: str = "") -> Part:
    reason = message or f"{TAP_FAILED.format(tap=tap)}: ValueError"
    return part(np.zeros(()), rank=rank, site=("forward", "", ITSELF, tap), unobserved=reason)


def step(*more: Part) -> list[Part]:
    return [*(part(random(3, 4, seed=0), site=site) for site in SITES), *more]


def seen(*faults: Part) -> FailedTaps:
    failed = FailedTaps()
    failed.see(step_table(step(*faults)), step=4)
    return failed


def left(*faults: Part) -> set[tuple[str, str]]:
    table = step_table(step(*faults))
    return {(key.phase, key.stage) for key in without_lost(table, seen(*faults).lost)}


def test_without_a_fault_everything_is_known() -> None:
    assert seen().notes() == []
    assert left() == {(phase, stage) for phase, stage, *_ in SITES}


@pytest.mark.parametrize(
    ("tap", "lost"),
    [
        ("module_outputs", {("forward", ""), ("backward", "")}),
        ("parameter_gradients", {("grad", "micro")}),
        ("model_state", {("param", ""), ("update", "")}),
        ("a tap of later versions", {(phase, stage) for phase, stage, *_ in SITES}),
    ],
)
def test_what_a_failed_tap_would_have_seen_is_left_out(tap: str, lost: set[tuple[str, str]]) -> None:
    assert left(fault(tap)) == {(phase, stage) for phase, stage, *_ in SITES} - lost


def test_what_failed_is_said_once_with_its_ranks_and_the_step() -> None:
    assert seen(fault("loss", rank=2), fault("loss", rank=0)).notes() == [
        "On ranks 0 and 2, the loss tap failed: ValueError. What it would have seen from step 4 on is unknown."
    ]


def test_what_traindiff_says_of_itself_otherwise_is_no_fault() -> None:
    told = fault("replica", message="no replica: the model is compiled")

    assert seen(told).lost == ()
    assert len(left(told)) == len(SITES)


def unseen(path: str, *, phase: str = "forward", how: str = UNSEEN) -> Part:
    return part(np.zeros(()), site=(phase, "", path, "output[0]"), unobserved=f"{how}: its hooks: were not called")


def test_what_was_not_observed_in_a_step_is_said_with_the_reason() -> None:
    assert seen(unseen("a"), unseen("b")).notes() == [
        "Not observed in step 4, so unknown: a and 1 more site. The reason: its hooks: were not called."
    ]


def test_of_a_phase_that_is_missing_no_single_sites_are_named() -> None:
    assert seen(unseen(ITSELF), unseen("a")).notes() == [
        "Not observed in step 4, so unknown: the phase forward. The reason: its hooks: were not called."
    ]


def test_what_may_be_missing_is_said_where_any_run_has_it() -> None:
    maybe = unseen("a", how=MAYBE_UNSEEN)
    other = step_table([part(random(3, 4, seed=0), site=("forward", "", "a", "output[0]"))])
    failed = FailedTaps()

    failed.see(step_table(step(maybe)), step=4)
    assert failed.notes() == []
    failed.see(step_table(step(maybe)), other, step=5)
    assert failed.notes() == ["Not observed in step 5, so unknown: a. The reason: its hooks: were not called."]


def test_reports_of_gaps_are_no_sites_of_the_step() -> None:
    """They are left out also where nothing else is lost with them."""
    table = step_table(step(fault("loss"), unseen("a"), unseen("b", how=MAYBE_UNSEEN)))

    assert {(key.phase, key.stage, key.path, key.slot) for key in without_lost(table, ())} == set(SITES)
