"""What happens to a recording while it is written is said once, where it is seen, and alters no training."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

import traindiff
from tests.warm_process import warm

ROOT = Path(__file__).parents[3]


def train(path: object, what: str) -> subprocess.CompletedProcess[str]:
    return warm("-m", "tests.observe.session.lost_training", str(path), what, cwd=ROOT, timeout=100)


@pytest.fixture(scope="module")
def expected() -> str:
    return train("", "").stdout


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("removed", "run is no longer there: it was moved, deleted or unmounted. What it held of the 4 steps"),
        ("moved", "run is no longer there: it was moved, deleted or unmounted. What it held of the 4 steps"),
        ("cut", "observations.arrows holds 4,000 of the "),
        ("hang", "TimeoutError: the file system took no data for 0.5 seconds"),
        ("hang at the end", "TimeoutError: the file system took no data for 0.5 seconds at the end; the last 3 steps"),
        ("hang and exit", "TimeoutError: the file system took no data for 0.5 seconds"),
    ],
)
def test_the_training_goes_on_and_one_warning_says_what_is_lost(
    what: str, message: str, expected: str, tmp_path: Path
) -> None:
    began = time.monotonic()
    result = train(tmp_path / "run", what)

    assert result.returncode == 5, result.stderr
    assert result.stdout == expected
    assert result.stderr.count("TraindiffWarning: traindiff") == 1
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert time.monotonic() - began < 90
    left = {"removed": None, "moved": tmp_path / "run-moved"}.get(what, tmp_path / "run")
    if left is not None:
        assert traindiff.open_recording(str(left)).status(0).message
    assert sorted(tmp_path.iterdir()) == ([] if left is None else [left])


def test_a_removed_directory_raises_in_strict_mode(tmp_path: Path) -> None:
    result = train(tmp_path / "run", "strict")

    assert result.returncode == 1
    assert "LostFilesError" in result.stderr


def test_what_a_recording_says_of_its_gap_is_said_by_compare_check_and_show(tmp_path: Path) -> None:
    train(tmp_path / "whole", "")
    train(tmp_path / "run", "cut")
    run, whole = str(tmp_path / "run"), str(tmp_path / "whole")
    for command in (["compare", whole, run], ["check", run], ["show", run]):
        result = warm("-c", "from traindiff.cli import main; main()", *command, timeout=100)
        assert "rank 0: the recording ends early: " in result.stdout.replace("\n", " "), command
        assert "it was cut short" in result.stdout
