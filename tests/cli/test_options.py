"""Options of all commands together: one name for one thing, in one order, in groups, completed by the shell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from tests.cli.conftest import GOLDEN
from traindiff.cli.commands import app

OF_ITS_OWN = {
    "--output": "a file or a directory, each with a default of its own",
    "--html": "what report writes, and what others write too",
    "--steps": "steps of a recording; how many steps to train; steps to record",
    "--list": "what is listed",
    "--format": "show has parquet",
    "--ranks": "how many train; which are recorded",
    "--replica": "of the baseline; of a recording",
    "--site": "export adds numbers of these sites",
    "--overwrite": "export's files are no recording",
}
"""Options that are described otherwise in some command, and why."""


def commands(group: Any, *before: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command, and those of groups."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *before, name)
        else:
            yield (*before, name), command


COMMANDS = dict(commands(get_command(app)))


def options(command: Any) -> list[Any]:
    """Options that people see, as they are declared."""
    return [one for one in command.params if one.param_type_name == "option" and not one.hidden]


def long_name(option: Any) -> str:
    """The first name of an option that has two dashes."""
    return next((name for name in option.opts if name.startswith("--")), option.opts[0])


@pytest.mark.parametrize("name", COMMANDS, ids=" ".join)
def test_the_help_has_no_types_of_python_and_fits_80_columns(name: tuple[str, ...]) -> None:
    said = CliRunner().invoke(app, [*name, "--help"], env={"COLUMNS": "80"}, terminal_width=80).output

    assert not re.findall(r"<[a-z]+\b[^>]*>|\{[A-Z]+\}|\[\[", said)
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize("name", COMMANDS, ids=" ".join)
def test_every_option_with_a_value_says_which(name: tuple[str, ...]) -> None:
    assert [long_name(one) for one in options(COMMANDS[name]) if not one.is_flag and not one.metavar] == []


def test_an_option_means_the_same_in_every_command() -> None:
    meanings: dict[str, set[tuple[Any, ...]]] = {}
    for command in COMMANDS.values():
        for one in options(command):
            meanings.setdefault(long_name(one), set()).add((one.help, one.metavar, one.rich_help_panel))

    assert {name for name, found in meanings.items() if len(found) > 1} == OF_ITS_OWN.keys()


def test_options_come_in_one_order() -> None:
    places = {
        name: {long_name(one): at for at, one in enumerate(options(command))} for name, command in COMMANDS.items()
    }
    for (one, here), (other, there) in combinations(places.items(), 2):
        shared = sorted(
            here.keys() & there.keys() - {"--steps", "--replica", "--ranks"}, key=lambda option, here=here: here[option]
        )
        assert shared == sorted(shared, key=lambda option, there=there: there[option]), (one, other)


def test_a_long_help_is_divided_into_groups() -> None:
    for name, command in COMMANDS.items():
        if len(options(command)) > 8:
            others = [long_name(one) for one in options(command) if not one.rich_help_panel]
            assert set(others) <= {"--list", "-m", "--help", "--show-settings"}, name


def completed(shell: str, words: str) -> str:
    """What a shell is given to complete the last of these words."""
    environment = os.environ | {
        "_TRAINDIFF_COMPLETE": f"complete_{shell}", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1),
        "_TYPER_COMPLETE_ARGS": words,
    }  # fmt: skip
    program = "import sys; sys.argv = ['traindiff']; from traindiff.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment, cwd=GOLDEN
    )
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_commands_options_and_values(shell: str) -> None:
    assert "compare" in completed(shell, "traindiff comp")
    assert "--identical" in completed(shell, "traindiff compare --ide")
    assert "markdown" in completed(shell, "traindiff check --format mark")
    assert "fsdp2" in completed(shell, "traindiff verify --engine fsdp")
