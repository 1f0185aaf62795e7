"""What activation checkpointing computes again is what it was the first time."""

from __future__ import annotations

import numpy as np
import pytest

from tests.analyse.merge.test_step_table import part
from tests.made_up import Array, Compared, Edit, Seen, Step, random
from traindiff.analyse.merge.step_table import step_table
from traindiff.analyse.rules.recomputation import changed_when_recomputed

HEAD = ("forward", "", "head", "output[0]")
AGAIN = ("forward", "recomputed", "head", "output[0]")


def recomputing(factor: float) -> Edit:
    """Have the backward pass compute an output again, and get a multiple of it."""

    def edit(_step: int, sites: Step) -> None:
        sites[AGAIN] = Seen(values=changed(sites[HEAD].values, factor))

    return edit


def changed(values: Array, factor: float) -> Array:
    return values * np.asarray(factor, dtype=values.dtype)


@pytest.mark.parametrize("factor", [1.0, 1 + 1e-6])
def test_the_same_output_up_to_rounding_is_no_finding(factor: float, compared: Compared) -> None:
    assert compared(recomputing(factor)).verdict == "identical"


def test_another_output_is_a_finding_where_only_the_candidate_gets_it(compared: Compared) -> None:
    found = compared(recomputing(1.5), baseline_edit=recomputing(1.0))

    first = found.first_divergence
    assert first is not None
    assert (found.verdict, first.step, first.kind, first.phase, first.stage, first.path) == (
        "diverged", 0, "recomputed", "forward", "recomputed", "head",
    )  # fmt: skip
    assert first.difference == pytest.approx(0.5, rel=1e-5)
    assert first.message == (
        "In the candidate, activation checkpointing computes head again and gets another output: another dropout mask "
        "(preserve_rng_state=False?), or an operation that is not deterministic? Its gradients do not belong to this "
        "loss."
    )


def test_what_both_runs_do_does_not_tell_them_apart(compared: Compared) -> None:
    found = compared(recomputing(1.5), baseline_edit=recomputing(1.5))

    assert found.verdict == "identical"
    assert any(note.startswith("In both runs: activation checkpointing computes head again") for note in found.notes)


def test_what_only_the_baseline_does_is_said_of_it(compared: Compared) -> None:
    first = compared(recomputing(1.0), baseline_edit=recomputing(1.5)).first_divergence

    assert first is not None
    assert first.message.startswith("In the baseline, activation checkpointing computes head again")


def test_indices_that_are_others_the_second_time_have_no_distance(compared: Compared) -> None:
    def edit(again: int) -> Edit:
        def both(_step: int, sites: Step) -> None:
            for stage, first in (("", 0), ("recomputed", again)):
                sites["forward", stage, "fc", "output[1]"] = Seen(values=np.arange(first, first + 5))

        return both

    first = compared(edit(1), baseline_edit=edit(0)).first_divergence

    assert first is not None
    assert (first.kind, first.slot, first.ratio) == ("recomputed", "output[1]", float("inf"))


@pytest.mark.parametrize(("calls", "found"), [(1, 1), (2, 0)])
def test_of_a_module_that_is_called_twice_nothing_is_said(calls: int, found: int) -> None:
    """Which call is computed again is not known."""
    outputs = [part(random(5, 4, seed=call), call=call) for call in range(calls)]
    table = step_table([*outputs, part(random(5, 4, seed=7), site=("forward", "recomputed", "fc", "output[0]"))])

    assert len(list(changed_when_recomputed(table))) == found
