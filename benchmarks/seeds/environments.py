"""The environments in which the originals run: one for each, with pinned packages, or a clone at a pinned commit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".venv-seeds"


class NoEnvironmentError(Exception):
    """An environment cannot be made; the message says why."""


def python_of(system: str, packages: tuple[str, ...], *, folder: Path = ENVIRONMENTS) -> Path | None:
    """The interpreter of a system's environment, which is made if it is not there, or if its packages have changed.

    Args:
        system: Name of the system.
        packages: Pinned requirements; None is returned if there are none.
        folder: Has a folder for each environment.

    Raises:
        NoEnvironmentError: The packages cannot be installed.
    """
    if not packages:
        return None
    place = folder / system
    ready, wanted = place / "ready", "\n".join(packages)
    python = place / "bin" / "python"
    if not ready.is_file() or ready.read_text() != wanted:
        shutil.rmtree(place, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(place)], system)
        _run([str(python), "-m", "pip", "install", "--quiet", *packages], system)
        ready.write_text(wanted)
    return python


def clone_of(repository: str, commit: str, *, variable: str) -> Path:
    """The folder of an original that is no package: its repository at a commit, which is cloned if it is not there.

    Args:
        repository: Its address.
        commit: The pinned commit.
        variable: Environment variable that may name another copy of the repository.

    Raises:
        NoEnvironmentError: It cannot be cloned, or does not have the commit.
    """
    place = ENVIRONMENTS / repository.rpartition("/")[2]
    if not (place / ".git").exists():
        _git(repository, variable, "clone", "--quiet", os.environ.get(variable, repository), str(place))
    _git(repository, variable, "-C", str(place), "checkout", "--quiet", commit)
    return place


def _git(repository: str, variable: str, *arguments: str) -> None:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        fix = f"Set {variable} to a clone of it."
        raise NoEnvironmentError(f"{repository} cannot be cloned: {done.stderr.strip()} {fix}")


def _run(command: list[str], system: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise NoEnvironmentError(f"the environment of {system} cannot be made: {said[0]}")
