"""The GitHub action: its steps, run in a shell as GitHub runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.made_up import FC, record, scaled

ROOT = Path(__file__).parents[1]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
EXAMPLE = yaml.safe_load((ROOT / "examples" / "github" / "training.yml").read_text(encoding="utf-8"))
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}


def judged(directory: Path, **inputs: str) -> tuple[str, str]:
    """The outputs and the summary of the step that compares, with a `traindiff` on the path."""
    command = directory / "bin" / "traindiff"
    command.parent.mkdir(exist_ok=True)
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m traindiff "$@"\n')
    command.chmod(0o755)
    for name in ("output", "summary"):
        (directory / name).touch()
    environment = {
        **os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}", "RUNNER_TEMP": str(directory),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "GITHUB_OUTPUT": str(directory / "output"), "GITHUB_STEP_SUMMARY": str(directory / "summary"),
        **dict.fromkeys(STEPS["Compare"]["env"], ""), **inputs,
    }  # fmt: skip
    subprocess.run(
        ["bash", "-eo", "pipefail", "-c", STEPS["Compare"]["run"]],
        cwd=directory,
        env=environment,
        timeout=120,
        check=True,
    )
    return (directory / "output").read_text(), (directory / "summary").read_text()


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    record(tmp_path / "base")
    record(tmp_path / "new", scaled(FC, 0.01, step=1))
    return tmp_path


def test_a_comparison_is_summed_up_and_its_exit_code_is_kept(recordings: Path) -> None:
    output, summary = judged(recordings, BASELINE="base", CANDIDATE="new", ARGUMENTS="--steps 0-2")

    assert output == "exit-code=1\n"
    assert summary.startswith("### ❌ traindiff: diverged")
    assert (recordings / "traindiff.md").read_text() == summary


def test_without_a_baseline_the_candidate_is_checked(recordings: Path) -> None:
    output, summary = judged(recordings, CANDIDATE="base")

    assert output == "exit-code=0\n"
    assert summary.startswith("### ✅ traindiff: healthy")


def test_what_cannot_be_judged_is_said_to_be_so(recordings: Path) -> None:
    output, summary = judged(recordings, BASELINE="base", CANDIDATE="nothing")

    assert output == "exit-code=2\n"
    assert summary == "### traindiff could not judge the recordings (exit code 2)\n"


def test_names_are_not_run_and_are_no_options(recordings: Path) -> None:
    output, _ = judged(recordings, BASELINE="base", CANDIDATE="$(touch run)", ARGUMENTS="`touch run` ; touch run")
    assert output == "exit-code=2\n"

    record(recordings / "--help")
    output, _ = judged(recordings, CANDIDATE="--help")
    assert "exit-code=0\n" in output
    assert not (recordings / "run").exists()


def test_no_step_puts_an_input_into_its_script() -> None:
    assert [name for name, step in STEPS.items() if "${{" in step["run"]] == []


def test_the_example_gives_the_action_what_it_takes() -> None:
    (used,) = (step for step in EXAMPLE["jobs"]["compare"]["steps"] if step.get("uses", "").startswith("traindiff/"))

    assert set(used["with"]) <= set(ACTION["inputs"])
    assert {name for name, one in ACTION["inputs"].items() if one.get("required")} <= set(used["with"])
    assert EXAMPLE["permissions"]["pull-requests"] == "write"
