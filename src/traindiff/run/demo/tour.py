"""The tour of `traindiff demo --tour`: commands that are run one after the other in a directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from traindiff.errors import ConfigError, Problem
from traindiff.run.demo import tour_training

SCRIPT = "train.py"
REPORT = "report.html"
_MARK = ".traindiff-tour"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """One step of the tour.

    Attributes:
        title: What it shows.
        command: The words of the command, as a user writes them.
        exit_code: The exit code that it has.
        after: A sentence on what was seen.
    """

    title: str
    command: tuple[str, ...]
    exit_code: int = 0
    after: str


STOPS = (
    Stop(
        title="Record a training as it is, without a change of its code",
        command=("traindiff", "run", "-o", "base", SCRIPT),
        after="base now holds a summary of every tensor of every step, about 1 kB each.",
    ),
    Stop(
        title="Record it once more, with a bug: zero_grad is left out",
        command=("traindiff", "run", "-o", "bug", SCRIPT, "--bug"),
        after="The losses look alike. A plot would not show the bug.",
    ),
    Stop(
        title="Compare: where do the two first diverge?",
        command=("traindiff", "compare", "base", "bug", "--top", "0"),
        exit_code=1,
        after="The exit code is 1. The line that begins with more: names the command that explains the finding.",
    ),
    Stop(
        title="Report: how does the difference spread?",
        command=("traindiff", "report", "base", "bug", "-o", REPORT),
        after="The page needs no server and no network.",
    ),
    Stop(
        title="Check: is one run healthy, without a baseline?",
        command=("traindiff", "check", "bug", "--top", "0"),
        exit_code=1,
        after="The same bug, found from one run alone.",
    ),
    Stop(
        title="Watch: where is the first infinity made? (The script calls traindiff.watch.)",
        command=("python", SCRIPT, "--overflow"),
        exit_code=1,
        after="The training ended at the operation that made the infinity, not steps later in the loss.",
    ),
)
"""The tour, in order."""


def prepare(directory: Path) -> None:
    """Make the directory of the tour, which may hold an earlier tour, and write the script of the training there.

    Raises:
        ConfigError: The directory holds other files.
    """
    if directory.exists() and any(directory.iterdir()):
        if not (directory / _MARK).exists():
            fix = "Give another directory with --output, or empty this one."
            problem = Problem(where=f"--output {directory}", what="holds files that are of no tour.", fix=fix)
            raise ConfigError("demo", [problem], consequence="nothing was run")
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / _MARK).touch()
    shutil.copyfile(tour_training.__file__, directory / SCRIPT)


def take(directory: Path, environment: dict[str, str]) -> Iterator[tuple[Stop, Sequence[str]]]:
    """Run the commands one after the other.

    Args:
        directory: Where to run them; see `prepare`.
        environment: Variables of the environment beside those of this process.

    Yields:
        Each stop with the lines that its command printed, standard error included.

    Raises:
        ConfigError: A command ended otherwise than it should.
    """
    for stop in STOPS:
        words = [sys.executable, *(("-m", "traindiff") if stop.command[0] == "traindiff" else ()), *stop.command[1:]]
        done = subprocess.run(
            words, cwd=directory, env={**os.environ, **environment}, text=True, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        if done.returncode != stop.exit_code:
            problem = Problem(
                where=" ".join(stop.command),
                what=f"ended with exit code {done.returncode} instead of {stop.exit_code}.",
                fix="traindiff doctor tells whether recording works here.",
                more=tuple(done.stdout.splitlines()[-20:]),
            )
            raise ConfigError("demo", [problem], consequence="the tour ends here")
        yield stop, done.stdout.rstrip("\n").splitlines()
