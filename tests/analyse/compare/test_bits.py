"""The first difference in bits: beside the first divergence in every result, and the verdict if bits are demanded."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.made_up import (
    BATCH,
    CONTENT,
    FC,
    HEAD,
    Compared,
    Edit,
    Measured,
    Seen,
    Site,
    Step,
    at,
    both,
    random,
    record,
    same,
    scaled,
)
from traindiff.analyse.compare import Comparison, compare
from traindiff.cli.commands import app
from traindiff.present.data import as_csv, as_junit, as_markdown
from traindiff.testing import assert_equivalent

WEIGHT = ("param", "", "fc.weight", "value")
GRADIENT = ("grad", "", "fc.weight", "grad")
LOSS: Site = ("loss", "", "loss", "backward")


def moved_one_bit(values: Any) -> Any:
    """The values; one element is the next number."""
    found = values.copy()
    found.reshape(-1)[3] = np.nextafter(found.reshape(-1)[3], np.float32(np.inf))
    return found


def place(comparison: Comparison) -> tuple[Any, ...] | None:
    first = comparison.first_bit_difference
    return None if first is None else (first.step, first.phase, first.path, first.slot)


def written(result: Comparison, form: Any) -> str:
    file = io.StringIO()
    form.write(result, file)
    return file.getvalue()


early = both(at(FC, moved_one_bit, step=1), at(GRADIENT, lambda x: x * 2, step=1))
"""A bit differs in the forward pass, and a gradient is wrong."""


def test_a_bit_that_differs_before_the_first_divergence_is_named_beside_it(compared: Compared) -> None:
    result = compared(early)

    assert result.first_divergence is not None
    assert (result.first_divergence.phase, result.first_divergence.path) == ("grad", "fc.weight")
    assert place(result) == (1, "forward", "fc", "output[0]")
    first = result.first_bit_difference
    assert first is not None
    assert (first.kind, first.floor, first.evidence["elements"]) == ("bits", 0.0, 40)
    assert 0 < first.difference < 1e-7
    assert "First difference in bits: step 1, micro-step 0, forward, fc output[0]. The bits differ by " in str(result)
    assert "in a tensor of 40 elements ([5, 8], float32)." in str(result)


def test_equivalent_runs_say_where_bits_first_differ(compared: Compared) -> None:
    result = compared(at(GRADIENT, moved_one_bit, step=2))

    assert result.verdict == "equivalent"
    assert place(result) == (2, "grad", "fc.weight", "grad")
    assert "First difference in bits: step 2" in str(result)


def test_identical_runs_have_no_difference_in_bits(compared: Compared) -> None:
    result = compared()

    assert (result.verdict, result.first_bit_difference) == ("identical", None)
    assert result.to_json()["first_bit_difference"] is None
    assert "every recorded tensor has the same bits" in str(result)


def test_one_place_is_not_told_twice(compared: Compared) -> None:
    result = compared(at(FC, lambda x: x * 2, step=1))

    assert str(result).count("fc output[0]") == 1
    assert "  First difference in bits: the same place." in str(result)


@pytest.mark.parametrize(
    ("site", "phase"), [(WEIGHT, "param"), (("param", "before", "fc.weight", "value"), "param"), (BATCH, "batch")]
)
def test_bits_are_seen_in_tensors_that_are_not_measured(compared: Compared, site: Any, phase: str) -> None:
    """A parameter after a step is judged by its update; an ulp of it is still no identical run."""
    result = compared(at(site, moved_one_bit, step=0))

    assert result.verdict != "identical"
    assert place(result) == (0, phase, site[2], site[3])


def test_a_random_state_from_which_nothing_is_drawn_is_no_difference(compared: Compared) -> None:
    def other(_step: int, sites: Step) -> None:
        for when in ("before", "after"):
            sites["batch", when, "rng", "cpu"] = Seen(values=np.full(4, 7, dtype=np.uint8))

    assert compared(other).verdict == "identical"


def test_equal_numbers_of_other_bits_are_a_difference(compared: Compared) -> None:
    zeros = at(HEAD, lambda x: np.where(x > 0, x, np.float32(0.0)))
    signed = at(HEAD, lambda x: np.where(x > 0, x, np.float32(-0.0)))

    result = compared(signed, baseline_edit=zeros)
    demanded = compared(signed, baseline_edit=zeros, identical=True)

    assert result.verdict == "equivalent"
    assert place(result) == place(demanded) == (0, "forward", "head", "output[0]")
    assert demanded.verdict == "diverged"
    assert "the numbers are equal (like 0 and -0)" in str(demanded)


def test_another_dtype_of_the_same_numbers_is_a_difference(compared: Compared) -> None:
    halves = at(FC, lambda x: x.astype(np.float16).astype(np.float32))
    result = compared(at(FC, lambda x: x.astype(np.float16)), baseline_edit=halves)

    assert place(result) == (0, "forward", "fc", "output[0]")
    assert "The dtype is float32 in the baseline and float16 in the candidate." in str(result)


# Losses are means and sums, which have no fingerprint.


def loss(value: float) -> Edit:
    """An edit: a loss that is averaged over ranks."""

    def edit(_step: int, sites: Step) -> None:
        sites[LOSS] = Seen(values=np.float32(value).reshape(()), about={"merge": "mean"})

    return edit


def test_a_loss_is_known_in_bits_if_both_runs_divide_it_alike(compared: Compared) -> None:
    value = np.float32(0.7)
    other = float(np.nextafter(value, np.float32(1)))

    assert compared(loss(value), baseline_edit=loss(value)).verdict == "identical"
    result = compared(loss(other), baseline_edit=loss(value))
    assert result.verdict == "equivalent"
    assert place(result) == (0, "loss", "loss", "backward")
    assert "The bits of a single number differ: 0.699999988 in the baseline and 0.700000048 in the candidate." in str(
        result
    )


def on_ranks(path: Path, *values: float) -> Path:
    """A run on as many ranks as there are values of the loss."""
    for rank, value in enumerate(values):
        edit = loss(value)
        record(path, edit, rank=rank, run={"world_size": len(values)}, content=CONTENT)
    return path


def test_what_the_runs_divide_differently_is_not_known_in_bits(tmp_path: Path) -> None:
    one, two = on_ranks(tmp_path / "one", 0.5), on_ranks(tmp_path / "two", 0.5, 0.5)

    result, demanded = compare(one, two), compare(one, two, identical=True)

    assert (result.verdict, place(result)) == ("equivalent", None)
    assert "First difference in bits: none is known." in str(result)
    assert any(note.startswith("Not known in bits: loss backward (loss).") for note in result.notes)
    assert demanded.verdict == "incomplete"


def test_terms_that_ranks_hold_are_compared_one_by_one(tmp_path: Path) -> None:
    first, second = on_ranks(tmp_path / "b", 0.5, 0.25), on_ranks(tmp_path / "c", 0.25, 0.5)

    result = compare(first, second)

    assert compare(first, on_ranks(tmp_path / "again", 0.5, 0.25)).verdict == "identical"
    assert place(result) == (0, "loss", "loss", "backward")


# Bits are demanded.


def test_the_first_site_with_other_bits_is_the_first_divergence(compared: Compared) -> None:
    result = compared(early, identical=True)

    assert result.verdict == "diverged"
    first = result.first_divergence
    assert first is not None
    assert (first.step, first.phase, first.path, first.kind) == (1, "forward", "fc", "bits")
    assert first.message.endswith("Any bit that differs counts, because identical results were asked for.")
    assert [one.path for one in result.findings] == ["fc", "fc.weight"]
    assert [(row.path, row.word) for row in result.differences if row.word != "identical"] == [
        ("fc", "above"),
        ("fc.weight", "above"),
        ("(all parameters)", "follows"),
    ]


def test_one_more_bit_behind_the_first_follows_from_it(compared: Compared) -> None:
    result = compared(both(at(FC, moved_one_bit, step=1), at(HEAD, moved_one_bit, step=1)), identical=True)

    assert [one.path for one in result.findings] == ["fc"]
    words = {row.path: row.word for row in result.differences if row.phase == "forward"}
    assert words == {"fc": "above", "head": "follows"}


def test_a_fault_keeps_its_own_explanation_if_bits_are_demanded(compared: Compared) -> None:
    result = compared(at(FC, lambda x: x * 2, step=1), identical=True)

    assert [(one.path, one.kind) for one in result.findings] == [("fc", "scale")]


def test_a_tolerance_does_not_hide_a_bit_that_is_demanded(compared: Compared) -> None:
    result = compared(early, identical=True, rtol=10.0)

    assert result.first_divergence is not None
    assert (result.verdict, result.first_divergence.path) == ("diverged", "fc")


def test_a_difference_of_representation_is_one_of_bits(compared: Compared) -> None:
    def trained(step: int, sites: Step) -> None:
        loss(0.5)(step, sites)

    edit = both(trained, at(FC, lambda x: x * 2))

    assert compared(edit, baseline_edit=trained).verdict == "equivalent"
    assert compared(edit, baseline_edit=trained, identical=True).verdict == "diverged"


def test_a_site_that_one_run_lacks_is_not_identical(compared: Compared) -> None:
    def more(step: int, sites: Step) -> None:
        loss(0.5)(step, sites)
        sites["forward", "", "attention.scores", "value"] = Seen(values=random(3, 3, seed=1))

    assert compared(loss(0.5), baseline_edit=more, identical=True).verdict == "incomplete"


def test_the_command_demands_bits(tmp_path: Path) -> None:
    runs = [str(record(tmp_path / "b")), str(record(tmp_path / "c", at(FC, moved_one_bit, step=1)))]

    plain = CliRunner().invoke(app, ["compare", *runs, "--json"])
    demanded = CliRunner().invoke(app, ["compare", *runs, "--identical", "--json"])
    equal = CliRunner().invoke(app, ["compare", runs[0], runs[0], "--identical"])

    assert (plain.exit_code, demanded.exit_code, equal.exit_code) == (0, 1, 0)
    assert json.loads(plain.stdout)["first_bit_difference"]["site"] == "fc"
    assert json.loads(demanded.stdout)["first_divergence"]["kind"] == "bits"


# A measured noise of 0.


def test_after_repeated_runs_with_the_same_bits_every_bit_is_a_finding(measured: Measured) -> None:
    result = measured(at(FC, moved_one_bit, step=1), same, same, replica=None)

    assert (result.verdict, result.calibrated) == ("diverged", True)
    assert result.first_divergence is not None
    assert (result.first_divergence.path, result.first_divergence.kind) == ("fc", "bits")
    assert "2 repeated runs had the same bits, so every difference counts." in result.notes
    assert "so every difference counts." in result.first_divergence.message


def test_a_replica_without_effect_says_nothing_of_bits(measured: Measured) -> None:
    result = measured(at(FC, moved_one_bit, step=1), same)

    assert (result.verdict, result.calibrated) == ("equivalent", False)
    assert "No noise recording differs from the baseline, so floors follow from rounding." in result.notes


def test_one_repeated_run_with_other_bits_is_noise(measured: Measured) -> None:
    result = measured(at(FC, moved_one_bit, step=1), same, at(HEAD, moved_one_bit, step=2), replica=None)

    assert (result.verdict, result.calibrated) == ("equivalent", True)


def test_a_repeated_run_that_lacks_a_site_does_not_measure_it(tmp_path: Path) -> None:
    def less(_step: int, sites: Step) -> None:
        del sites[HEAD]

    baseline, again = record(tmp_path / "b"), record(tmp_path / "again", less)

    result = compare(baseline, record(tmp_path / "c", at(HEAD, moved_one_bit, step=1)), noise=again)

    assert (result.verdict, result.calibrated) == ("equivalent", False)


def test_steps_that_no_repeated_run_has_are_judged_by_rounding(measured: Measured) -> None:
    result = measured(at(FC, moved_one_bit, step=2), same, replica=None, steps=2)

    assert (result.verdict, result.calibrated) == ("equivalent", False)
    assert any(note.startswith("No repeated run has step 2") for note in result.notes)


def test_where_noise_was_not_measured_floors_decide_again(tmp_path: Path) -> None:
    """Step 0 is covered by the repeated run, and step 2 is not: what differs there is within its floor."""
    baseline, again = record(tmp_path / "b"), record(tmp_path / "again", steps=1)

    result = compare(baseline, record(tmp_path / "c", at(FC, moved_one_bit, step=2)), noise=again)

    assert result.verdict == "equivalent"
    assert [row.word for row in result.differences if row.path == "fc"] == ["within", "identical"]


def test_a_difference_before_the_measured_steps_is_no_divergence_to_follow_from(tmp_path: Path) -> None:
    baseline, again = record(tmp_path / "b"), record(tmp_path / "again", steps=range(2, 3))
    candidate = record(tmp_path / "c", both(at(FC, moved_one_bit, step=0), at(HEAD, moved_one_bit, step=2)))

    result = compare(baseline, candidate, noise=again)

    assert result.verdict == "equivalent"
    assert {row.word for row in result.differences} == {"identical", "within"}


# Every output.


def test_every_output_says_where_bits_first_differ(compared: Compared) -> None:
    result = compared(early)

    assert "First difference in bits: step 1" in written(result, as_markdown)
    assert "First difference in bits: step 1" in written(result, as_junit)
    assert result.to_json()["first_bit_difference"]["site"] == "fc"
    header, *lines = written(result, as_csv).splitlines()
    column = header.split(",").index("first_other_bits")
    begun = {tuple(line.split(",")[4:8]): line.split(",")[column] for line in lines}
    assert begun["forward", "", "fc", "output[0]"] == begun["grad", "", "fc.weight", "grad"] == "1"
    assert begun["forward", "", "head", "output[0]"] == ""


def test_a_passing_result_says_it_too(compared: Compared) -> None:
    result = compared(at(FC, moved_one_bit, step=1))

    assert "First difference in bits: step 1" in written(result, as_junit)
    assert "First difference in bits: step 1" in written(result, as_markdown)


def test_assert_equivalent_names_the_first_site_in_bits(tmp_path: Path) -> None:
    """It named the site whose largest difference comes first in its own step, of any step."""
    edit = both(at(HEAD, moved_one_bit, step=0), at(FC, moved_one_bit, step=2))
    runs = record(tmp_path / "b"), record(tmp_path / "c", edit)

    with pytest.raises(AssertionError, match=r"First divergence: step 0, micro-step 0, forward, head output\[0\]"):
        assert_equivalent(*runs, identical=True)
    assert_equivalent(*runs)


def test_scaled_sites_are_still_found(compared: Compared) -> None:
    result = compared(scaled(FC, 0.01, step=1))

    assert place(result) == (1, "forward", "fc", "output[0]")
