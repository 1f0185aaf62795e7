"""Noise that was measured: floors that follow replicas, what they rest on, and replicas that are none."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.made_up import (
    BATCH,
    CONTENT,
    FC,
    HEAD,
    Edit,
    Measured,
    Seen,
    Step,
    at,
    both,
    plain_step,
    random,
    record,
    rotated,
    same,
    scaled,
)
from traindiff.analyse.compare import Comparison, SiteDifference, compare
from traindiff.analyse.noise.measured import ALONE, SAFETY
from traindiff.cli.commands import app
from traindiff.errors import ConfigError

FC_SPREAD = 1 + 4 / math.sqrt(40)
"""By how much the distances of a few replicas may be too small, of 40 elements."""


def row(comparison: Comparison, site: tuple[str, str, str, str]) -> SiteDifference:
    return next(one for one in comparison.differences if (one.phase, one.stage, one.path, one.slot) == site)


# Floors.


def test_a_floor_is_what_the_replicas_differ_by_at_the_site(measured: Measured) -> None:
    small = measured(rotated(FC, 2e-5), scaled(FC, 1e-5), scaled(FC, 1e-5))
    large = measured(rotated(FC, 2e-5), scaled(FC, 1e-3), scaled(FC, 1e-3))

    assert row(small, FC).floor == pytest.approx(SAFETY * FC_SPREAD * 1e-5, rel=0.01)
    assert row(large, FC).floor == pytest.approx(SAFETY * FC_SPREAD * 1e-3, rel=0.01)


def test_within_what_replicas_differ_by_runs_are_equivalent_and_beyond_it_they_diverge(measured: Measured) -> None:
    replicas = [scaled(FC, 1e-4), rotated(FC, 1e-4)]

    within, beyond = measured(rotated(FC, 2e-4), *replicas), measured(rotated(FC, 1e-3), *replicas)

    assert (within.verdict, within.calibrated) == ("equivalent", True)
    assert (beyond.verdict, beyond.calibrated) == ("diverged", True)
    assert beyond.first_divergence is not None
    assert beyond.first_divergence.path == "fc"
    assert str(within).startswith("equivalent: ")  # and not "(uncalibrated)"


def test_what_replicas_differ_by_elsewhere_says_nothing_of_a_site(measured: Measured) -> None:
    found = measured(rotated(FC, 1e-3), scaled(HEAD, 1e-2), scaled(HEAD, 1e-2))

    assert found.first_divergence is not None
    assert found.first_divergence.path == "fc"


def test_where_inputs_agree_better_than_the_replicas_did_less_is_allowed(measured: Measured) -> None:
    replicas = [both(scaled(FC, 1e-3), scaled(HEAD, 2e-3))] * 2

    noisy_inputs = measured(both(rotated(FC, 1e-3), rotated(HEAD, 2e-3)), *replicas)
    equal_inputs = measured(rotated(HEAD, 2e-3), *replicas)

    assert noisy_inputs.verdict == "equivalent"
    assert equal_inputs.first_divergence is not None
    assert equal_inputs.first_divergence.path == "head"


@pytest.mark.parametrize(
    ("size", "rows", "word"),
    [(0.05, 10, "equivalent"), (0.05, 12, "equivalent"), (0.0, 10, "diverged"), (0.05, 20, "diverged")],
    ids=["noise turns one", "noise turns some", "equal inputs", "too many"],
)
def test_a_router_picks_another_number_of_rows_only_where_its_inputs_differ_enough(
    size: float, rows: int, word: str, measured: Measured
) -> None:
    routed = at(("forward", "", "head", "output[0]"), lambda x: random(rows, 4, seed=9), step=1)

    found = measured(both(routed, rotated(FC, size)), rotated(FC, 0.05), rotated(FC, 0.06), build=with_routed_rows)

    assert found.verdict == word, str(found)
    note = f"first at step 1, forward of head output[0]: {rows} rows, 9 in the baseline"
    assert any(note in one for one in found.notes) == (word == "equivalent")


def with_routed_rows(step: int) -> Step:
    found = plain_step(step)
    if step == 1:
        found["forward", "", "head", "output[0]"] = Seen(values=random(9, 4, seed=9))
    return found


def test_replicas_say_nothing_of_optimizer_states_and_updates_under_other_settings(measured: Measured) -> None:
    setting = ("optimizer", "", "optimizer.groups[0]", "weight_decay")
    state = ("optimizer", "", "fc.weight", "momentum_buffer")
    updated = ("param", "", "fc.weight", "value")

    found = measured(
        both(at(setting, lambda x: x * 2), scaled(state, 1.0), scaled(updated, 0.5)), scaled(FC, 1e-6), scaled(FC, 1e-6)
    )

    assert (found.verdict, [one.kind for one in found.findings]) == ("misaligned", ["hyper-parameter"])


def test_a_floor_is_never_below_rounding(measured: Measured) -> None:
    found = measured(rotated(FC, 1e-7), scaled(FC, 1e-9), scaled(HEAD, 1e-4))

    assert row(found, FC).floor >= SAFETY * 2.0**-24


def test_a_replica_whose_whole_numbers_differ_leaves_no_floor_there(measured: Measured) -> None:
    def build(step: int) -> Step:
        return {**plain_step(step), ("forward", "", "router", "output[0]"): Seen(values=np.arange(9) + step)}

    route = ("forward", "", "router", "output[0]")
    found = measured(same, at(route, lambda x: x + 1), scaled(FC, 1e-5), build=build)

    assert found.verdict == "identical"
    json.dumps(found.to_json(), allow_nan=False)


# Constants.


def test_the_constant_is_what_each_replica_needs_to_stay_within_the_others(measured: Measured) -> None:
    found = measured(same, scaled(FC, 1e-4), scaled(FC, 1e-4), scaled(FC, 8e-4))

    assert found.noise is not None
    assert found.noise["constants"]["forward"] == pytest.approx(8 / FC_SPREAD, rel=0.01)
    assert found.noise["safety"] == SAFETY


def test_replicas_that_agree_on_the_noise_need_no_constant(measured: Measured) -> None:
    found = measured(same, scaled(FC, 1e-4), scaled(FC, 1.1e-4), scaled(FC, 0.9e-4))

    assert found.noise is not None
    assert found.noise["constants"].get("forward", 1.0) == 1.0


def test_a_constant_is_of_its_phase_only(measured: Measured) -> None:
    backward = ("backward", "", "head", "output[0]")
    replicas = [both(scaled(backward, 1e-4), scaled(FC, size)) for size in (1e-4, 1e-4, 8e-4)]

    found = measured(same, *replicas)

    assert found.noise is not None
    assert [phase for phase, constant in found.noise["constants"].items() if constant > 1.0] == ["forward"]


# What the verdict rests on.


def test_one_replica_is_multiplied_by_an_assumed_factor_and_the_report_says_so(measured: Measured) -> None:
    found = measured(rotated(FC, 1e-5), scaled(FC, 1e-4))

    assert found.calibrated
    assert row(found, FC).floor == pytest.approx(SAFETY * ALONE * FC_SPREAD * 1e-4, rel=0.01)
    assert found.noise is not None
    assert found.noise["constants"] is None
    assert "Floors are measured from 1 replica: ulp:1." in found.notes
    assert any(note.startswith("One replica cannot be held against others, so floors are 8 x") for note in found.notes)


def test_a_baseline_that_repeats_itself_is_said_first(measured: Measured) -> None:
    found = measured(rotated(FC, 1e-7), same, replica=None)

    assert str(found).startswith("Your baseline's own noise is 0: run again, it gives the same bits.\n\ndiverged:")
    assert found.calibrated
    assert found.noise is not None
    assert found.noise["own"] == {"difference": 0.0, "where": ""}
    assert "1 repeated run had the same bits, so every difference counts." in found.notes


def test_a_baseline_that_does_not_repeat_itself_is_said_first_with_size_and_place(measured: Measured) -> None:
    found = measured(rotated(FC, 1e-4), rotated(FC, 2e-3), replica=None)

    assert str(found).startswith(
        "Your baseline's own noise is 0.002 at most: run again, it differs by that in step 0, forward of fc output[0]."
    )
    assert found.verdict == "equivalent"
    assert found.calibrated
    assert found.noise is not None
    assert found.noise["recordings"][0]["replica"] is None


def test_repeated_runs_alone_do_not_tell_what_another_implementation_may_differ_by(measured: Measured) -> None:
    found = measured(same, rotated(FC, 1e-4), rotated(FC, 2e-4), replica=None)

    assert any(note.startswith("All of them are repeated runs") for note in found.notes)


def test_a_repeated_run_with_other_whole_numbers_or_nan_is_without_bound_and_valid_json(measured: Measured) -> None:
    found = measured(same, at(FC, lambda x: x * np.float32(np.nan)), replica=None)

    assert str(found).startswith("Your baseline's own noise is without bound")
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["noise"]["own"]["difference"] is None


def test_replicas_that_are_identical_leave_floors_that_follow_from_rounding(measured: Measured) -> None:
    found = measured(rotated(FC, 1e-7), same, same)

    assert (found.verdict, found.calibrated) == ("equivalent", False)
    assert found.noise is not None
    assert len(found.noise["identical"]) == 2
    assert "No noise recording differs from the baseline, so floors follow from rounding." in found.notes


def test_steps_that_no_replica_has_are_named_and_the_verdict_is_uncalibrated(measured: Measured) -> None:
    found = measured(rotated(FC, 1e-7), scaled(FC, 1e-5), scaled(FC, 1e-5), steps=1)

    assert not found.calibrated
    assert "No replica has 2 steps from 1 on; floors there follow from rounding." in found.notes
    assert row(found, FC).num_steps == 3


# Replicas that are none.


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (at(("param", "before", "fc.weight", "value"), lambda x: x + 1, step=0), "fc.weight starts with other values"),
        (at(BATCH, lambda x: x + 1), "The batch differs: (root) input[0] holds other values."),
        (at(("batch", "before", "rng", "cpu"), lambda x: x + 9), "torch's cpu random state differs"),
        (
            at(("optimizer", "", "optimizer.groups[0]", "lr"), lambda x: x * 2),
            "lr is 0.1 in the baseline and 0.2 in the candidate",
        ),
    ],
    ids=["seed", "batch", "random state", "learning rate"],
)
def test_a_run_of_another_training_is_no_replica(edit: Edit, message: str, measured: Measured) -> None:
    def draws(step: int) -> Step:
        return {**plain_step(step), ("batch", "after", "rng", "cpu"): Seen(values=np.full(4, 99, dtype=np.uint8))}

    with pytest.raises(ConfigError) as caught:
        measured(same, scaled(FC, 1e-5), both(edit, scaled(FC, 1e-5)), build=draws)

    printed = str(caught.value)
    assert "noise-2" in printed
    assert "is no other run of the baseline's training. In step 0:" in printed
    assert message in printed
    assert "Record it with the baseline's script, seed and data" in printed


def test_a_replica_of_another_model_has_nothing_in_common(tmp_path: Path) -> None:
    def other(step: int) -> Step:
        return {
            (phase, stage, f"other.{path}", slot): seen
            for (phase, stage, path, slot), seen in plain_step(step).items()
            if phase in ("forward", "grad")
        }

    baseline, again = record(tmp_path / "baseline"), record(tmp_path / "again")
    noise = record(tmp_path / "noise", build=other, content={**CONTENT, "optimizers": []})

    with pytest.raises(ConfigError, match="has no step and site in common with the baseline"):
        compare(baseline, again, noise=noise)


def test_noise_that_has_none_of_the_steps_is_refused(tmp_path: Path) -> None:
    baseline, again = record(tmp_path / "baseline"), record(tmp_path / "again")
    noise = record(tmp_path / "noise", steps=range(7, 9))

    with pytest.raises(ConfigError, match="Record it with the baseline's script, over the same steps"):
        compare(baseline, again, noise=[noise])


def test_the_command_refuses_another_training_with_exit_code_two_and_says_what_to_do(tmp_path: Path) -> None:
    paths = [str(record(tmp_path / name)) for name in ("baseline", "again")]
    noise = str(record(tmp_path / "noise", at(BATCH, lambda x: x + 1)))

    result = CliRunner().invoke(app, ["compare", *paths, "--noise", noise])

    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"noise {noise}" in result.stderr
    assert "Record it with the baseline's script, seed and data" in result.stderr


def test_the_command_measures_floors_from_all_noise_that_it_is_given(tmp_path: Path) -> None:
    paths = [str(record(tmp_path / "baseline")), str(record(tmp_path / "candidate", rotated(FC, 1e-4)))]
    replicas = [
        str(record(tmp_path / f"noise-{number}", scaled(FC, 1e-4), recorded={"replica": f"ulp:{number}"}))
        for number in (1, 2)
    ]

    result = CliRunner().invoke(app, ["compare", *paths, "--noise", replicas[0], "--noise", replicas[1], "--json"])

    found = json.loads(result.stdout)
    assert (result.exit_code, found["verdict"], found["calibrated"]) == (0, "equivalent", True)
    assert found["noise"]["recordings"] == [
        {"path": path, "replica": f"ulp:{number}"} for number, path in enumerate(replicas, start=1)
    ]


def test_a_replica_that_is_none_in_full_calibrates_nothing(measured: Measured) -> None:
    def failed(step: int, sites: Step) -> None:
        scaled(HEAD, 1e-4)(step, sites)
        reason = "this is no full replica: MemoryError: on purpose"
        sites["batch", "", "traindiff", "replica"] = Seen(values=np.zeros(1), about={"unobserved": reason})

    comparison = measured(same, scaled(HEAD, 1e-4), failed)

    assert not comparison.calibrated
    assert any("this is no full replica: MemoryError: on purpose. Floors that are" in note for note in comparison.notes)


def lost(_step: int, sites: Step) -> None:
    """A site of which there are no numbers."""
    sites[HEAD].about["unobserved"] = "it was not seen"


def test_a_repeated_run_that_lacks_a_site_does_not_show_that_the_noise_is_0(measured: Measured) -> None:
    whole, lacking = (measured(scaled(FC, 2e-7), edit, replica=None) for edit in (same, lost))

    assert (whole.calibrated, whole.verdict) == (True, "diverged")
    assert (lacking.calibrated, lacking.verdict) == (False, "equivalent")
