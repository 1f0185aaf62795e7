"""The word of a verdict, and the exit code that goes with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.made_up import CONTENT, Compared, Edit, Seen, Step, at, record
from traindiff.analyse.align.pairs import Unaligned
from traindiff.analyse.compare import Comparison, compare
from traindiff.errors import ConfigError, NotARecordingError

FC = ("forward", "", "fc", "output[0]")


def test_equal_recordings_are_identical(compared: Compared) -> None:
    comparison = compared()

    assert (comparison.verdict, comparison.exit_code) == ("identical", 0)
    assert comparison.first_divergence is None
    assert comparison.steps == (0, 1, 2)


def test_rounding_is_equivalent(compared: Compared) -> None:
    comparison = compared(at(FC, lambda x: x * np.float32(1 + 2e-7)))

    assert (comparison.verdict, comparison.exit_code) == ("equivalent", 0)
    assert not comparison.calibrated


def test_more_than_rounding_is_diverged(compared: Compared) -> None:
    comparison = compared(at(FC, lambda x: x * np.float32(1.01), step=1))

    assert (comparison.verdict, comparison.exit_code) == ("diverged", 1)
    first = comparison.first_divergence
    assert first is not None
    assert (first.step, first.phase, first.path, first.slot) == (1, "forward", "fc", "output[0]")


def test_another_batch_is_misaligned(compared: Compared) -> None:
    comparison = compared(at(("batch", "", "", "input[0]"), lambda x: x + 1))

    assert (comparison.verdict, comparison.exit_code) == ("misaligned", 3)


def test_a_candidate_that_ends_early_is_incomplete(compared: Compared) -> None:
    comparison = compared(steps=2)

    assert (comparison.verdict, comparison.exit_code) == ("incomplete", 3)
    assert comparison.steps == (0, 1)
    assert comparison.notes == (
        "The candidate ends after step 1; 1 later step of the other run was not compared. "
        "(--steps compares a part on purpose.)",
    )


def test_a_candidate_that_ends_early_may_be_compared_in_part(tmp_path: Path) -> None:
    comparison = compare(record(tmp_path / "b"), record(tmp_path / "c", steps=2), steps="0-1")

    assert comparison.verdict == "identical"


def test_a_divergence_outweighs_what_is_missing(compared: Compared) -> None:
    assert compared(at(FC, lambda x: -x), steps=2).verdict == "diverged"


def test_an_empty_recording_is_incomplete(compared: Compared) -> None:
    comparison = compared(steps=0)

    assert comparison.verdict == "incomplete"
    assert "has no finished step among those asked for" in comparison.notes[0]


def test_steps_that_neither_run_has_are_incomplete(tmp_path: Path) -> None:
    comparison = compare(record(tmp_path / "b"), record(tmp_path / "c"), steps="7-9")

    assert comparison.verdict == "incomplete"
    assert comparison.steps == ()
    assert str(comparison).startswith("incomplete: nothing could be compared\n")


def test_recordings_without_a_common_step_say_which_they_have(tmp_path: Path) -> None:
    comparison = compare(record(tmp_path / "b", steps=2), record(tmp_path / "c", steps=range(5, 7)))

    assert comparison.notes == (
        "The recordings have no step in common: the baseline has steps 0 to 1, the candidate 5 to 6.",
    )


def test_a_missing_rank_is_incomplete(tmp_path: Path) -> None:
    candidate = record(tmp_path / "c", run={"world_size": 2})
    comparison = compare(record(tmp_path / "b"), candidate)

    assert comparison.verdict == "incomplete"
    assert "candidate: rank 1 left no recording." in comparison.notes


def test_recordings_of_different_models_are_not_equivalent(tmp_path: Path) -> None:
    def other(_step: int) -> Step:
        return {
            ("forward", "", "encoder", "output[0]"): Seen(values=np.ones((3, 4), np.float32)),
            ("param", "", "encoder.weight", "value"): Seen(values=np.ones((3, 4), np.float32)),
        }

    content = {**CONTENT, "modules": {"encoder": "Linear"}, "parameters": {"encoder.weight": {}}, "optimizers": []}
    comparison = compare(record(tmp_path / "b"), record(tmp_path / "c", build=other, content=content))

    assert comparison.verdict == "incomplete"
    assert "Only in the baseline: " in str(comparison)
    assert "Only in the candidate: encoder output[0] (forward), " in str(comparison)
    assert "--rename PATTERN=REPLACEMENT" in str(comparison)


def test_a_site_that_both_runs_have_is_not_called_one_runs() -> None:
    site = Unaligned(phase="backward", path="fc", slot="output[0]", first_step=0, num_steps=2)
    own = Unaligned(phase="forward", path="gate", slot="output[0]", first_step=0, num_steps=2)
    comparison = Comparison(
        baseline="b", candidate="c", verdict="incomplete", calibrated=False, findings=(), steps=(0, 1), notes=(),
        unaligned=((site,), (site, own)), differences=(),
    )  # fmt: skip

    assert "Only in the candidate: gate output[0] (forward)." in str(comparison)
    assert "In both runs, but in other steps, calls or passes of a step, so not compared: fc output[0] (backward)." in (
        str(comparison)
    )
    assert "Only in the baseline" not in str(comparison)
    assert "--rename" not in str(comparison)


def test_a_wider_model_is_misaligned(compared: Compared) -> None:
    comparison = compared(at(("param", "before", "head.weight", "value"), lambda x: np.vstack([x, x]), step=0))

    assert comparison.verdict == "misaligned"
    assert comparison.first_divergence is not None
    assert comparison.first_divergence.message == (
        "head.weight has shape [4, 8] in the baseline and [8, 8] in the candidate: "
        "another model, or another layout of the same one?"
    )


def test_a_path_without_a_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotARecordingError, match="does not exist"):
        compare(record(tmp_path / "b"), tmp_path / "nothing")


@pytest.mark.parametrize("options", [{"rtol": -1.0}, {"atol": float("nan")}, {"steps": "3-1"}, {"rename": ["no"]}])
def test_unusable_settings_are_refused_before_anything_is_read(tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="nothing was compared"):
        compare(tmp_path / "b", tmp_path / "c", **options)  # type: ignore[arg-type]


def test_how_often_a_site_was_identical_is_counted(compared: Compared) -> None:
    comparison = compared(at(FC, lambda x: x * np.float32(1 + 2e-7), step=1))

    counts = {
        row.path: (row.num_steps, row.num_identical_steps) for row in comparison.differences if row.phase == "forward"
    }
    assert counts == {"fc": (3, 2), "head": (3, 3)}


def test_stages_that_only_missing_ranks_have_are_named(tmp_path: Path) -> None:
    content = {**CONTENT, "pipeline": {"num_stages": 4, "ranks": [0, 1, 2, 1], "stages": [0]}}
    candidate = record(tmp_path / "c", run={"world_size": 3}, content=content)

    notes = compare(record(tmp_path / "b"), candidate).notes

    assert (
        "candidate: ranks 1 and 2 left no recordings. Not recorded, so not compared: stage 1, 2, 3 of the pipeline."
        in notes
    )


def test_what_kept_its_own_values_in_a_forced_run_is_said(compared: Compared) -> None:
    content = {**CONTENT, "not_forced": {"fc output[0]": "a view", "head output[0]": "a view"}}

    assert compared(content=content).notes == (
        "Not forced, so what is computed from it may carry earlier errors: fc output[0] (a view) and 1 more.",
    )


def test_circumstances_that_are_lists_are_written_out(compared: Compared) -> None:
    notes = compared(run={"environment": {"devices": ["cpu", "cuda"]}}).notes

    assert notes == ("Circumstances differ (baseline and candidate): devices none and cpu, cuda.",)


def failed(why: str = "ValueError") -> Edit:
    def edit(step: int, sites: Step) -> None:
        about = {"unobserved": f"the loss tap failed: {why}"}
        if step == 1:
            sites["loss", "", "traindiff", "loss"] = Seen(values=np.zeros(()), about=about)

    return edit


def test_what_a_failed_tap_would_have_seen_leaves_the_verdict_open(compared: Compared) -> None:
    comparison = compared(failed())

    assert comparison.verdict == "incomplete"
    assert comparison.notes[0] == (
        "candidate: on rank 0, the loss tap failed: ValueError. What it would have seen from step 1 on is unknown."
    )
    assert compared(failed("KeyError"), baseline_edit=failed()).verdict == "incomplete"


def test_a_tap_that_failed_alike_in_runs_of_the_same_bits_is_noted_once(compared: Compared) -> None:
    comparison = compared(failed(), baseline_edit=failed())

    assert comparison.verdict == "identical"
    assert comparison.notes == (
        "Both runs: on rank 0, the loss tap failed: ValueError. What it would have seen from step 1 on is unknown.",
    )
