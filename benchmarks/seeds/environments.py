"""The environments in which the originals run: one for each, with pinned packages."""

from __future__ import annotations

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


def _run(command: list[str], system: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise NoEnvironmentError(f"the environment of {system} cannot be made: {said[0]}")
