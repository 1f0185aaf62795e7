"""Defaults of options from a file: which file, which tables, what it may not say, and what is said of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.cli.conftest import GOLDEN
from traindiff.cli.commands import app
from traindiff.cli.settings_file import NEVER

BASELINE, AGAIN, CANDIDATE = (str(GOLDEN / name) for name in ("baseline", "again", "candidate"))


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(text: str, name: str = "traindiff.toml") -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text, encoding="utf-8")


def called(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def test_a_table_of_a_command_and_keys_for_all_are_defaults_and_this_is_said() -> None:
    written('rtol = 1e9\n[compare]\nformat = "json"\n')

    code, out, said = called("compare", BASELINE, CANDIDATE)

    assert (code, json.loads(out)["verdict"]) == (0, "equivalent")
    assert said == "traindiff: traindiff.toml sets --rtol 1000000000.0, --format json\n"


def test_the_command_line_comes_first_and_is_not_said_to_be_of_the_file() -> None:
    written("rtol = 1e9\ntop = 1")

    code, _, said = called("compare", BASELINE, CANDIDATE, "--rtol", "1e-9")

    assert (code, said) == (1, "traindiff: traindiff.toml sets --top 1\n")


def test_the_table_of_a_command_comes_before_keys_for_all() -> None:
    written("top = 1\n[compare]\ntop = 2")

    assert "--top 2\n" in called("compare", BASELINE, AGAIN)[2]
    assert "--top 1\n" in called("check", BASELINE)[2]


def test_pyproject_counts_if_it_has_the_table_and_the_nearest_file_wins() -> None:
    written("[tool.traindiff.compare]\ntop = 5", "pyproject.toml")
    assert "pyproject.toml [tool.traindiff] sets --top 5" in called("compare", BASELINE, AGAIN)[2]

    written("top = 6")  # in the same directory
    assert "traindiff.toml sets --top 6" in called("compare", BASELINE, AGAIN)[2]


def test_a_pyproject_of_another_project_is_passed_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written("top = 7")
    written("[tool.other]\na = 1\n", "below/pyproject.toml")
    written("this is no TOML", "below/further/pyproject.toml")
    monkeypatch.chdir(tmp_path / "below" / "further")

    assert "sets --top 7" in called("compare", BASELINE, AGAIN)[2]


def test_files_that_are_named_are_relative_to_the_file_of_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written('[compare]\naccept = "accepted.toml"\nmap = "no-such-map"')
    written('[[accept]]\nname = "*"\nreason = "a test"', "accepted.toml")
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")

    _, out, _ = called("compare", BASELINE, AGAIN, "--show-settings")

    assert str(tmp_path / "accepted.toml") in out
    assert " no-such-map " in out


def test_everything_that_is_wrong_is_said_at_once_with_the_nearest_name() -> None:
    written(
        'compar = 1\n[compare]\nnois = ["x"]\ntop = "many"\nidentical = "yes"\nsteps = 2020-01-01\n'
        'webhook = "http://x"\n[check]\nrules = 1.5\ntop = [1]\n'
    )

    code, out, said = called("compare", BASELINE, AGAIN)

    assert (code, out) == (2, "")
    assert "traindiff: 7 problems in traindiff.toml; nothing was done." in said
    for part in (
        '"compar" is not an option or a command of traindiff.\n    Did you mean "compare"?',
        '[compare]\n    "nois" is not an option of traindiff compare.\n    Did you mean "noise"?',
        "traindiff.toml [compare] top = 'many'\n    cannot be used: ",
        "traindiff.toml [compare] identical = 'yes'\n    is a str; it must be true or false.",
        "steps = datetime.date(2020, 1, 1)\n    is a date; it must be a text or a number.",
        "traindiff.toml [compare] webhook\n    says what is written, sent or run.",
    ):
        assert part in said


@pytest.mark.parametrize(
    ("command", "setting"),
    [
        ("check", "alert = 'wandb=theirs'"),
        ("run", "compact = 100"),
        ("run", "replica = 'ulp:1'"),
        ("demo", "tour = true"),
        ("rerun", "memory = 900"),
    ],
)
@pytest.mark.parametrize("table", [True, False])
def test_what_is_written_sent_or_run_is_not_set(command: str, setting: str, table: bool) -> None:
    written(f"[{command}]\n{setting}" if table else setting)

    code, out, said = called(command, "--show-settings")

    assert (code, out) == (2, "")
    assert "says what is written, sent or run. That is given on the command line only." in said


def test_all_that_is_on_the_command_line_only_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text(encoding="utf-8")
    listed = page.partition("given on the command line only:")[2].partition("\n\n`traindiff.record`")[0]

    assert {*re.findall(r"`--([\w-]+)`", listed)} == NEVER


def test_an_option_of_several_meanings_needs_the_table_of_a_command() -> None:
    written("steps = 3")
    code, _, said = called("compare", BASELINE, AGAIN)
    assert code == 2
    assert "means different things to different commands" in said

    written("[verify]\nsteps = 3\n[compare]\nsteps = '0'")
    assert "sets --steps 0\n" in called("compare", BASELINE, AGAIN)[2]


@pytest.mark.parametrize(
    "text", ["a = = 1", "\x00", "top = 1\n" + "# " + "x" * (1 << 18)], ids=["syntax", "NUL", "size"]
)
def test_a_file_that_cannot_be_read_is_an_error_and_help_is_still_there(text: str) -> None:
    written(text)

    code, out, said = called("compare", BASELINE, AGAIN)

    assert (code, out) == (2, "")
    assert "traindiff.toml" in said
    assert called("compare", "--help")[0] == 0


def test_settings_are_shown_with_where_they_come_from_and_nothing_is_done() -> None:
    written('[check]\nskip = "spike"')

    code, out, said = called("check", "--show-settings", "--top", "3")

    assert (code, said) == (0, "")
    lines = {line.split()[0]: line.split(maxsplit=2)[1:] for line in out.splitlines()[1:]}
    assert lines["--skip"] == ["spike", "traindiff.toml [check]"]
    assert lines["--top"] == ["3", "command line"]
    assert lines["--rules"] == ["-", "default"]
    assert lines["--webhook"] == ["-", "default (on the command line only)"]


def test_settings_of_a_script_are_those_of_record() -> None:
    written('[run]\ndetail = ["signs", "tensors"]\nselect = ["a.*", "b.*"]\nevery = 10')

    _, out, _ = called("run", "--show-settings")

    shown = {" ".join(line.split()) for line in out.splitlines()}
    place = "traindiff.toml [run]"
    assert {f"--select a.*, b.* {place}", f"--detail signs,tensors {place}", f"--every 10 {place}"} <= shown
