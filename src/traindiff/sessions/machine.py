"""What `run.json` says of the circumstances of a run whatever its framework is."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from traindiff._version import __version__


def circumstances(*, packages: Collection[str], environment: Mapping[str, Any]) -> dict[str, Any]:
    """Circumstances that can change a run's numbers, as JSON values.

    Args:
        packages: Of which versions matter, where they are installed.
        environment: What the framework is set to.
    """
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [_text(argument) for argument in sys.argv],
        "versions": _versions(packages),
        "environment": {"platform": platform.platform(), "machine": platform.machine(), **environment},
        "source": _source(),
    }


def variables(prefixes: tuple[str, ...]) -> dict[str, str]:
    """Environment variables whose names begin with one of these."""
    return {name: _text(value) for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


def _versions(packages: Collection[str]) -> dict[str, str]:
    found = {"python": platform.python_version(), "traindiff": __version__}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _text(argument: str) -> str:
    """The argument as UTF-8 can hold it: Python passes on bytes that are none as lone surrogates."""
    return os.fsencode(argument).decode(errors="replace")


def _source() -> dict[str, Any]:
    """Revision of the git checkout that the run was started in; empty where there is none."""
    git = shutil.which("git")
    if git is None:
        return {}

    def ask(*arguments: str) -> str:
        result = subprocess.run(
            [git, *arguments], capture_output=True, text=True, timeout=5, check=True, stdin=subprocess.DEVNULL
        )
        return result.stdout.strip()

    try:
        return {"revision": ask("rev-parse", "HEAD"), "modified": bool(ask("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return {}
