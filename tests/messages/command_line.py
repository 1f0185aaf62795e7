"""What the command says of arguments that it cannot use, and names that the package does not have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.made_up import record
from tests.messages.provoking import Chapter

chapter = Chapter("The command line", [])
situation = chapter.situation


def command(*arguments: str) -> str:
    """What a command prints on standard error."""
    from typer.testing import CliRunner

    from traindiff.cli import (  # noqa: F401  each registers its command
        check,
        compare,
        demo,
        doctor,
        export,
        replay,
        report,
        show,
        verify,
        view,
    )  # fmt: skip
    from traindiff.cli.app import app

    result = CliRunner().invoke(app, arguments, prog_name="traindiff", catch_exceptions=False)
    lines = result.stderr.rstrip().splitlines()
    assert not result.stdout
    said = "\n".join(f"    {line}".rstrip() for line in lines)
    return f"$ traindiff {' '.join(arguments)}\n{said}\nExit code {result.exit_code}."


for title, arguments in {
    "a command that there is not": ("comprae", "baseline", "candidate"),
    "an argument too few": ("compare", "baseline"),
    "an argument too many": ("compare", "baseline", "candidate", "other"),
    "an option that there is not": ("compare", "baseline", "candidate", "--step", "3"),
    "a number that is none": ("compare", "baseline", "candidate", "--rtol", "small"),
    "a number below what is possible": ("show", "baseline", "--top", "-1"),
    "a word that is not one of those known": ("show", "baseline", "--format", "html"),
    "a recording that does not exist": ("compare", "baseline", "candidat"),
    "steps that are none": ("show", "baseline", "--steps", "first"),
    "a phase that there is not": ("show", "baseline", "--phase", "gradient"),
    "Parquet without a file": ("show", "baseline", "--format", "parquet"),
    "a file that cannot be written": ("show", "baseline", "--output", "nowhere/table.csv"),
    "a recipe that does not exist": ("verify", "trian.py:recipe"),
    "a moment to pin that there is not": ("verify", "--pin", "sometimes"),
    "a fault that there is not": ("demo", "--fault", "lost_gradient"),
    "a directory without a saved module": ("replay", "baseline"),
}.items():

    def _provoke(here: Path, patched: pytest.MonkeyPatch, arguments: tuple[str, ...] = arguments) -> str:
        for name in ("baseline", "candidate"):
            record(here / name)
        return command(*arguments)

    situation(title)(_provoke)


def without_torch(source: str) -> str:
    """The last line of what Python prints where torch is not installed."""
    source = f"import sys; sys.modules['torch'] = None\n{source}"
    result = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    return f"    {result.stderr.splitlines()[-1]}"


@situation("a command that needs torch, where there is none")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    return without_torch("sys.argv = ['traindiff', 'verify']\nfrom traindiff.cli import main\nmain()")


@situation("a function that needs torch, where there is none")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    return without_torch("import traindiff; traindiff.record")


@situation("a name that the package does not have")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    return without_torch("import traindiff; traindiff.recrod")
