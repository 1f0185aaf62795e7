"""`traindiff resume`: in fresh processes, what it prints, and how it exits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.observe.sharding.deepspeed_training import NEEDS_DEEPSPEED
from tests.run.verify.recipes import one_thread
from traindiff.cli.commands import app


def resume(here: Path, recipe: str, *more: str) -> Result:
    with one_thread():
        command = ["resume", recipe, "--steps", "2", "-o", str(here / "runs"), "--top", "0", *more]
        return CliRunner().invoke(app, command, catch_exceptions=False)


def test_a_complete_training_goes_on_exactly_in_a_fresh_process(tmp_path: Path) -> None:
    found = resume(tmp_path, "tests.run.resume.recipes:complete", "--at", "2")

    assert found.exit_code == 0
    assert found.stdout == (
        "identical: the training goes on exactly as if it had never stopped after 2 steps\n\n"
        "Before step 2, everything was as it had been saved.\n\n"
        "The steps after it, against a training that never stopped\n"
        "identical: every recorded tensor has the same bits, over 2 steps (2 to 3)\n"
    )


def test_what_was_left_out_is_printed(tmp_path: Path) -> None:
    found = resume(tmp_path, "tests.run.resume.recipes:without_scheduler", "--at", "2")

    assert found.exit_code == 1
    assert found.stdout.startswith(
        "diverged: the training that was resumed after 2 steps is another one\n\n"
        "Before step 2, its first one after loading\n"
        "  The scheduler has.scheduler (StepLR) was not restored (last_epoch is 0; it was 2; "
    )


@pytest.mark.parametrize(("engine", "ranks"), [("ddp", "2"), ("fsdp2", "2"), ("fsdp2", "2:1"), ("fsdp1", "1:2")])
def test_a_training_on_several_ranks_goes_on_on_as_many_or_others(engine: str, ranks: str, tmp_path: Path) -> None:
    found = resume(
        tmp_path, "traindiff.run.demo.recipes:mlp", "--at", "2", "--engine", engine, "--ranks", ranks
    )  # fmt: skip

    assert found.exit_code == 0
    assert found.stdout.startswith("equivalent: " if ":" in ranks else "identical: ")
    assert "everything was as it had been saved" in found.stdout


def test_ranks_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    found = resume(tmp_path, "traindiff.run.demo.recipes:mlp", "--at", "2", "--ranks", "two")

    assert found.exit_code == 2
    assert "Write 2, or 2:4" in found.stderr.replace("\n", " ").replace("│", "")


@pytest.mark.parametrize("option", [("--baseline-engine", "ddp"), ("--baseline-compile",)])
def test_there_is_no_trusted_training_to_set_up(option: tuple[str, ...], tmp_path: Path) -> None:
    found = resume(tmp_path, "traindiff.run.demo.recipes:mlp", "--at", "2", *option)

    assert found.exit_code == 2
    assert f"No such option: {option[0]}" in found.stderr


def test_a_training_with_too_few_batches_says_so(tmp_path: Path) -> None:
    found = resume(tmp_path, "traindiff.run.demo.recipes:mlp", "--at", "99")

    assert found.exit_code == 2
    assert "recipe mlp, batches\n    are 100 and step 100 needs another." in found.stderr


def test_verify_resumes_its_candidate_if_asked_to(tmp_path: Path) -> None:
    command = ["verify", "traindiff.run.demo.recipes:mlp"]
    command += ["--candidate", "tests.run.resume.recipes:without_scheduler"]
    command += ["--resume-at", "2", "--steps", "1", "-o", str(tmp_path / "runs"), "--json"]
    with one_thread():
        found = CliRunner().invoke(app, command, catch_exceptions=False)

    result = json.loads(found.stdout)
    assert (found.exit_code, result["schema"]["name"], result["at"]) == (1, "traindiff-resumption", 2)
    assert [one["what"] for one in result["differences"]] == ["scheduler"]


@NEEDS_DEEPSPEED
def test_a_training_under_deepspeed_goes_on_exactly(tmp_path: Path) -> None:
    found = resume(
        tmp_path, "traindiff.run.demo.recipes:mlp", "--at", "2", "--engine", "deepspeed", "--zero-stage", "2"
    )  # fmt: skip

    assert found.exit_code == 0
    assert found.stdout.startswith("identical: ")
