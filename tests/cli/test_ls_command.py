"""`traindiff ls`: every recording under a directory, readable or not, in one line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.cli.conftest import GOLDEN
from traindiff.cli.commands import app
from traindiff.run.agents.tools import Tools


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("baseline", "candidate"):
        shutil.copytree(GOLDEN / name, tmp_path / "runs" / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def called(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["ls", *arguments], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.usefixtures("runs")
def test_a_line_says_how_far_a_run_came() -> None:
    code, out, said = called()

    head, *lines = out.splitlines()
    assert (code, said) == (0, "")
    assert head.split("  ")[0] == "recording"
    assert {line.split()[0] for line in lines} == {"runs/baseline", "runs/candidate"}
    (about,) = (one for one in json.loads(called("--json")[1])["recordings"] if one["path"] == "runs/baseline")
    assert about["last_step"] is not None
    (line,) = (line for line in lines if line.startswith("runs/baseline "))
    assert f" {about['last_step']} " in line


def test_paths_are_those_that_other_commands_take(runs: Path) -> None:
    found = json.loads(called(str(runs), "--json")[1])["recordings"]

    assert {one["path"] for one in found} == {str(runs / "baseline"), str(runs / "candidate")}


def test_what_cannot_be_read_is_listed_as_such(runs: Path) -> None:
    (runs / "candidate" / "run.json").write_text("{}")

    code, out, _ = called()

    (line,) = (line for line in out.splitlines() if line.startswith("runs/candidate "))
    assert (code, line.endswith("cannot be read")) == (0, True)


def test_no_directory_is_an_error_and_an_empty_one_is_said(tmp_path: Path) -> None:
    assert called(str(tmp_path / "nothing"))[0] == 2
    nothing = f"There is no recording under {tmp_path}, down to 6 levels of directories.\n"
    assert called(str(tmp_path)) == (0, nothing, "")


def test_of_too_many_recordings_the_latest_are_listed_and_the_others_are_not_forgotten(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traindiff.present.viewer.catalog.MOST", 1)
    for seconds, name in enumerate(("baseline", "candidate")):
        os.utime(runs / name / "run.json", (seconds, seconds))
    found, text = json.loads(called("--json")[1]), called()[1]

    assert ([one["path"] for one in found["recordings"]], found["has_more"]) == (["runs/candidate"], True)
    assert text.endswith("There are more than the 1 of this list. --after 1 lists further ones.\n")
    found = json.loads(called("--json", "--after", "1")[1])
    assert ([one["path"] for one in found["recordings"]], found["has_more"]) == (["runs/baseline"], False)
    assert called("--after", "2")[1].startswith("There is no other recording under ")
    found = Tools(runs).recordings()
    assert ([one["name"] for one in found["recordings"]], found["has_more"]) == (["candidate"], True)
    found = Tools(runs).recordings(after=1)
    assert ([one["name"] for one in found["recordings"]], found["has_more"]) == (["baseline"], False)
    assert CliRunner().invoke(app, []).stdout.startswith("more than 1 recording here\n")


def test_a_directory_may_be_a_url_of_this_machine(runs: Path) -> None:
    found = json.loads(called(f"file://{runs}", "--json")[1])
    assert sorted(one["path"] for one in found["recordings"]) == [
        f"file://{runs}/{one}" for one in ("baseline", "candidate")
    ]
