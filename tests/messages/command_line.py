"""What the command says of arguments that it cannot use, and names that the package does not have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.made_up import record
from tests.messages.provoking import Chapter
from traindiff.run.script.account import Account, SeenModel, SeenOptimizer
from traindiff.run.script.script import Script

chapter = Chapter("The command line", [])
situation = chapter.situation


def command(*arguments: str) -> str:
    """What a command prints on standard error."""
    from typer.testing import CliRunner

    from traindiff.cli.commands import app

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
    "options of two recordings, and one": ("report", "baseline", "--rtol", "1e-3", "--identical"),
    "options that a resumed candidate does not follow": ("verify", "--resume-at", "1", "--rtol", "0.1", "--zoom"),
    "combinations to run again, and no grid": ("verify", "--fresh"),
    "two formats at once": ("compare", "baseline", "candidate", "--json", "--format", "csv"),
    "patience, and no run that goes on": ("check", "baseline", "--patience", "3"),
    "gradients of some steps for msprobe": ("export", "msprobe", "baseline", "--steps", "0"),
    "two directories for an export": ("export", "tensorboard", "baseline", "files", "-o", "other"),
    "a report into a pipe": ("report", "baseline", "-o", "pipe"),
    "a list of recordings under nothing": ("ls", "nothing"),
    "a site to ignore that is none": ("compare", "baseline", "candidate", "--ignore", ""),
    "a file that cannot be written": ("show", "baseline", "--output", "nowhere/table.csv"),
    "a recipe that does not exist": ("verify", "trian.py:recipe"),
    "a recipe to investigate that does not exist": ("investigate", "trian.py:recipe"),
    "a moment to pin that there is not": ("verify", "--pin", "sometimes"),
    "a fault that there is not": ("demo", "--fault", "lost_gradient"),
    "a tour where other files are": ("demo", "--tour", "-o", "baseline"),
    "a directory without a saved module": ("rerun", "baseline"),
    "a script that does not exist": ("run", "trian.py", "--lr", "3"),
    "a program that starts the ranks, in place of a script": ("run", "-o", "base", "torchrun", "train.py"),
    "a module that does": ("run", "-o", "base", "-m", "torch.distributed.run", "train.py"),
    "python in place of a script": ("run", "-o", "base", "python3.11", "train.py"),
    "a script that is a directory": ("run", "baseline"),
    "a recording of a script where there is one": ("run", "-o", "baseline", "train.py"),
    "a recording of a script where there is something else": ("run", "-o", "train.py", "train.py"),
    "settings for a script that are none": ("run", "--observe", "gradients", "--steps", "9-0", "train.py"),
    "no directory for the recording of a script": ("run", "-o", "", "train.py"),
    "bounds for a script that are none": ("run", "--bounds", "small", "train.py"),
    "a batch axis for a script that is none": ("run", "--batch-axis", "encoder=first", "train.py"),
    "ranks of a script that are none": ("run", "--ranks", "all", "train.py"),
    "steps of a script that are kept rank by rank, and are none": ("run", "--compact", "0", "train.py"),
}.items():

    def _provoke(here: Path, patched: pytest.MonkeyPatch, arguments: tuple[str, ...] = arguments) -> str:
        for name in ("baseline", "candidate"):
            record(here / name)
        (here / "train.py").touch()
        os.mkfifo(here / "pipe")
        return command(*arguments)

    situation(title)(_provoke)


SETTINGS = """
rtol = 1e-3
steps = 3
compar = 1
webhook = "http://example.com"
[compare]
top = "many"
identical = "yes"
nois = ["replica"]
"""

for title, (name, text) in {
    "a file of settings with everything wrong": ("traindiff.toml", SETTINGS),
    "a file of settings that is no TOML": ("pyproject.toml", "[tool.traindiff]\nrtol = = 1\n"),
    "a file of settings that is too large": ("traindiff.toml", "# " + "x" * (1 << 18)),
}.items():

    def _from_a_file(here: Path, patched: pytest.MonkeyPatch, name: str = name, text: str = text) -> str:
        record(here / "baseline")
        (here / name).write_text(text)
        return command("check", "baseline")

    situation(title)(_from_a_file)


@situation("a module to run that does not exist")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    Script(name="trian", is_module=True).prepared()


@situation("a module to run in a package that does not exist")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    Script(name="pakcage.train", is_module=True).prepared()


def said_at_the_end(*accounts: Account) -> str:
    """What `traindiff run` says when scripts have ended."""
    return "\n\n".join("\n".join(f"    traindiff: {line}" for line in one.lines()) for one in accounts)


@situation("scripts that were run and not recorded")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    adam = SeenOptimizer(kind="Adam", num_parameters=4)
    return said_at_the_end(
        Account(recording="run"),
        Account(recording="run", torch_imported=True),
        Account(recording="run", torch_imported=True, optimizers=[adam]),
        Account(recording="run", torch_imported=True, own_recording="runs/own"),
        Account(recording="run", torch_imported=True, left_out=True),
        Account(recording="run", torch_imported=True, failure="traindiff failed: KeyError: 'encoder'."),
    )


@situation("a script that was recorded, and all that could not be seen of it")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    return said_at_the_end(
        Account(
            recording="run", attached_late=True, num_processes=4, own_recording="runs/own",
            models=[
                SeenModel(name="generator", kind="Generator (OptimizedModule)", num_tensors=8),
                SeenModel(name="critic", kind="Critic", num_tensors=1, num_scripted=3),
            ],
            untrained=[SeenModel(name="", kind="VGG", num_tensors=32)] * 7,
            optimizers=[
                SeenOptimizer(kind="Adam", num_parameters=8, num_steps=20, followed_as="optimizer"),
                SeenOptimizer(kind="Adam", num_parameters=8, num_steps=1, followed_as="optimizer[1]"),
                SeenOptimizer(kind="SGD", num_parameters=1, num_steps=20),
            ],
        )
    )  # fmt: skip


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
