"""A check of runs that were killed: what is missing of them, and how far each rank came."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import traindiff
from tests.made_up import CONTENT, Step, record
from traindiff.analyse.check import Verdict

SAYS = "the recording was not closed (the run was killed, could not write, or still runs)"


def killed(path: Path, *, steps: int = 3, **about: Any) -> Path:
    return record(path, steps=steps, close=False, **about)


def test_a_run_that_was_killed_is_incomplete_and_its_last_observation_is_named(tmp_path: Path) -> None:
    verdict = traindiff.check(killed(tmp_path / "run"))

    assert (verdict.verdict, verdict.exit_code, verdict.steps) == ("incomplete", 3, (0, 1, 2))
    assert verdict.notes == (
        f"rank 0: {SAYS}. Its last finished step is 2; its last observation is param head.weight value in step 2.",
    )


def test_each_rank_that_was_killed_is_named_with_where_it_was(tmp_path: Path) -> None:
    def in_backward(step: int, sites: Step) -> None:
        if step == 2:
            for site in [site for site in sites if site[0] in ("optimizer", "grad", "param")]:
                del sites[site]

    run = {"world_size": 3}
    record(tmp_path / "run", rank=0, run=run, steps=2)
    record(tmp_path / "run", rank=1, run=run, steps=2, close=False)
    record(tmp_path / "run", in_backward, rank=2, run=run, steps=3, close=False)

    verdict = traindiff.check(tmp_path / "run")

    assert verdict.verdict == "incomplete"
    assert verdict.notes[:2] == (
        f"rank 1: {SAYS}. Its last finished step is 1; its last observation is param head.weight value in step 1.",
        f"rank 2: {SAYS}. Its last finished step is 1; its last observation is backward fc output[0] in step 2.",
    )


def test_a_run_that_was_killed_before_it_observed_anything_says_so(tmp_path: Path) -> None:
    verdict = traindiff.check(killed(tmp_path / "run", steps=0))

    assert verdict.verdict == "incomplete"
    assert f"rank 0: {SAYS}. It has observed nothing." in verdict.notes


@pytest.mark.parametrize(
    ("steps", "settings", "word"),
    [
        ("0-2", {}, "healthy"),
        ("1", {}, "healthy"),
        ("0-3", {}, "incomplete"),
        ("0-1,9", {}, "incomplete"),
        ("2-", {}, "incomplete"),
        (None, {"steps": "0-2"}, "healthy"),
        (None, {"steps": "0-2,7"}, "incomplete"),
        ("0-3", {"every": 2}, "healthy"),
        ("0-4", {"every": 2}, "incomplete"),
    ],
)
def test_steps_that_were_all_finished_are_healthy_however_the_run_ended(
    steps: str | None, settings: dict[str, Any], word: str, tmp_path: Path
) -> None:
    verdict = traindiff.check(killed(tmp_path / "run", recorded=settings), steps=steps)

    assert verdict.verdict == word
    assert any(SAYS in note for note in verdict.notes)


def test_every_report_says_that_a_run_is_incomplete(tmp_path: Path) -> None:
    import io

    from traindiff.present.data import FORMATS, writer

    verdict = traindiff.check(killed(tmp_path / "run"))
    written = {}
    for form in FORMATS:
        file = io.StringIO()
        writer(form)(verdict, file)
        written[form] = file.getvalue()

    assert json.loads(written["json"])["verdict"] == "incomplete"
    assert "traindiff: incomplete" in written["markdown"]
    assert "<error message=" in written["junit"]
    assert all("last observation" in written[form] for form in ("json", "markdown", "junit"))


def aborted(path: Path, error: Any) -> Verdict:
    content = {**CONTENT, "ended": {"steps": {"optimizer": 3}, "error": error}}
    return traindiff.check(record(path, content=content))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ({"type": "ValueError", "message": "a\nb\x1b[31m", "step": 3}, r"ended by ValueError in step 3: a\nb\x1b[31m."),
        ({"type": "E", "message": "Why?", "step": 3}, "ended by E in step 3: Why? "),
        ({"type": "", "message": "", "step": 3}, "the program ended in the middle of step 3."),
    ],
)
def test_what_a_recording_says_of_its_end_is_shown_as_text(error: Any, message: str, tmp_path: Path) -> None:
    verdict = aborted(tmp_path / "run", error)

    assert verdict.verdict == "incomplete"
    assert message in verdict.notes[0]


@pytest.mark.parametrize(
    "ended", [None, [], "x", {"steps": [], "error": 3}, {"error": {}}, {"steps": {"optimizer": "many"}}, {}]
)
def test_what_makes_no_sense_of_an_end_is_left_out(ended: Any, tmp_path: Path) -> None:
    verdict = traindiff.check(record(tmp_path / "run", content={**CONTENT, "ended": ended}))

    assert (verdict.verdict, verdict.notes) == ("healthy", ())


def test_a_rank_that_was_killed_leaves_a_comparison_open_where_the_other_run_has_it(tmp_path: Path) -> None:
    for name, steps in (("baseline", 3), ("candidate", 2)):
        record(tmp_path / name, rank=0, run={"world_size": 2}, steps=3)
        record(tmp_path / name, rank=1, run={"world_size": 2}, steps=steps, close=steps == 3)

    comparison = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate")

    assert comparison.verdict == "incomplete"
    assert "candidate: rank 1 did not record step 2, which others did." in comparison.notes
