"""The command as users start it: in a process of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import traindiff
from tests.cli.conftest import GOLDEN
from traindiff.cli.app import MODULES, ScriptReady, main
from traindiff.cli.commands import app
from traindiff.core.settings import SETTINGS


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "traindiff", *arguments],
        capture_output=True, text=True, cwd=GOLDEN, timeout=60, check=False,
    )  # fmt: skip


def test_the_version_is_printed() -> None:
    result = start("--version")

    assert (result.returncode, result.stdout, result.stderr) == (0, f"traindiff {traindiff.__version__}\n", "")


def test_help_lists_the_commands() -> None:
    result = start("--help")

    assert result.returncode == 0
    assert "Find where, when and on which rank the numbers of a training first go wrong." in result.stdout
    assert "compare" in result.stdout
    assert "show" in result.stdout


def commands(group: Any, *before: str) -> Iterator[tuple[str, ...]]:
    """Every command of a group, and of the groups in it."""
    for name, command in group.commands.items():
        yield (*before, name)
        if hasattr(command, "commands"):
            yield from commands(command, *before, name)


@pytest.mark.parametrize("command", [(), *commands(get_command(app))], ids=" ".join)
def test_every_command_explains_itself_for_the_short_option_too(command: tuple[str, ...]) -> None:
    short, long = (CliRunner().invoke(app, [*command, option]) for option in ("-h", "--help"))

    assert (short.exit_code, short.output) == (0, long.output)
    assert "Usage: " in short.output


def test_a_command_that_does_not_exist_exits_with_two() -> None:
    result = start("compere", "baseline", "again")

    assert result.returncode == 2
    assert result.stdout == ""
    assert "No such command 'compere'" in result.stderr


@pytest.mark.parametrize(("candidate", "code"), [("again", 0), ("candidate", 1), ("nothing", 2)])
def test_exit_codes_reach_the_shell(candidate: str, code: int) -> None:
    assert start("compare", "baseline", candidate).returncode == code


def test_a_reader_that_stops_early_is_no_error() -> None:
    command = f"{sys.executable} -W error -m traindiff show baseline -f csv | head -n 1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=GOLDEN, timeout=60, check=True)

    assert result.stdout.startswith("step,evaluation,micro_step,rank")
    assert result.stderr == ""


def test_run_has_an_option_for_every_setting_of_record_but_shards() -> None:
    said = start("run", "--help").stdout
    options = set(re.findall(r"^  (?:-\w, )?--([\w-]+)", said, re.MULTILINE))

    assert options - {"help", "output", "overwrite", "show-settings"} == {
        name.replace("_", "-") for name in SETTINGS
    } - {"shards"}


@pytest.mark.parametrize(("written", "distance"), [(("--compact", "all"), 0), (("--compact", "100"), 100), ((), None)])
def test_run_merges_the_ranks_of_all_steps_or_keeps_some(
    written: tuple[str, ...], distance: int | None, tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    arguments = ["run", "-o", str(tmp_path / "run"), *written, str(tmp_path / "train.py")]

    with pytest.raises(ScriptReady) as ready:
        get_command(app).main(arguments, standalone_mode=False)

    assert ready.value.settings["settings"].compact == distance


def test_each_command_is_declared_by_the_module_that_is_imported_for_it() -> None:
    commands = {one.name or one.callback.__name__: one.callback for one in app.registered_commands if one.callback}
    assert MODULES.keys() == commands.keys() | {group.name for group in app.registered_groups}
    for name, command in commands.items():
        assert command.__module__ == f"traindiff.cli.{MODULES[name]}"


@pytest.mark.parametrize("name", ["show", "compare", "run"])
def test_a_command_is_run_without_importing_the_others(name: str) -> None:
    program = (
        f"import sys; sys.argv = ['traindiff', {name!r}, '--help']\n"
        "from traindiff.cli.app import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "assert 'traindiff.cli.doctor' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"traindiff {name}" in done.stdout or "Usage" in done.stdout


@pytest.mark.parametrize("command", ["compare baseline again", "show baseline -f csv", "--help", "explain json"])
def test_a_result_that_nobody_reads_is_no_divergence(command: str) -> None:
    line = f"{sys.executable} -W error -m traindiff {command} | true; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=GOLDEN, timeout=60, check=False)

    assert (result.returncode, result.stderr) == (141, "")


def test_a_command_that_is_interrupted_says_so(traindiff: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("traindiff.analyse.compare.compare", interrupted)
    result = traindiff("compare", "baseline", "again")

    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "traindiff: interrupted\n")


@pytest.mark.parametrize("error", [EOFError, ValueError])
def test_a_fault_of_traindiff_is_no_divergence(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def faulty(*_: Any, **__: Any) -> None:
        raise error("at fault")

    monkeypatch.chdir(GOLDEN)
    monkeypatch.setattr(sys, "argv", ["traindiff", "compare", "baseline", "again"])
    monkeypatch.setattr("traindiff.analyse.compare.compare", faulty)
    with pytest.raises(SystemExit) as exits:
        main()

    assert exits.value.code == 2
    assert capfd.readouterr().err.endswith(f"{error.__name__}: at fault\n")


def test_a_name_that_the_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "baseline", tmp_path / "größe")
    result = subprocess.run(
        [sys.executable, "-m", "traindiff", "ls"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False,
    )  # fmt: skip

    assert (result.returncode, result.stderr) == (0, "")
    assert "gr\\xf6\\xdfe" in result.stdout
