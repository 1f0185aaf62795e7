"""`traindiff` without arguments."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.made_up import CONTENT, FC, record, scaled
from traindiff.cli.app import MODULES
from traindiff.cli.commands import app


def said(directory: Path, patched: pytest.MonkeyPatch) -> str:
    patched.chdir(directory)
    result = CliRunner().invoke(app, [], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def commands(text: str) -> list[list[str]]:
    """The commands in the lines that are indented, without the first word."""
    lines = [line.strip() for line in text.splitlines() if line.startswith("  traindiff ")]
    return [shlex.split(line.partition("  ")[0])[1:] for line in lines]


def test_elsewhere_it_says_how_to_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = said(tmp_path, monkeypatch)

    assert text.startswith("There is no recording in this directory, down to 3 levels of directories. To begin:\n")
    assert [words[0] for words in commands(text)] == ["demo", "run", "check"]


def test_where_recordings_are_it_lists_them_and_names_commands_that_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path / "runs" / "my base")
    record(tmp_path / "runs" / "new", scaled(FC, 0.01, step=1))

    text = said(tmp_path, monkeypatch)

    assert text.startswith("2 recordings here\n")
    asked = commands(text)
    assert [words[0] for words in asked] == ["check", "compare", "report", "show", "view"]
    assert asked[1] == ["compare", "runs/my base", "runs/new"]
    codes = [CliRunner().invoke(app, words).exit_code for words in asked[:-1]]
    assert codes == [0, 1, 0, 0]
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_runs_of_two_models_are_no_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "base", content={**CONTENT, "model": "GPT"})
    record(tmp_path / "new", content={**CONTENT, "model": "Llama"})

    assert [words[0] for words in commands(said(tmp_path, monkeypatch))] == ["check", "show", "view"]


def test_one_recording_is_no_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "run")

    text = said(tmp_path / "run", monkeypatch)

    assert text.startswith("1 recording here\n")
    assert [words[:2] for words in commands(text)] == [["check", "."], ["show", "."], ["view", "."]]


def test_names_cannot_do_anything_to_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "run\x1b[2Jrm")

    text = said(tmp_path, monkeypatch)

    assert "\x1b" not in text
    assert r"run\x1b[2Jrm" in text
    assert commands(text) == [["check", "RECORDING"]]


def test_what_cannot_be_read_is_said_to_be_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "run.json").write_text("{")

    assert "cannot be read" in said(tmp_path, monkeypatch)


def test_the_commands_to_begin_with_are_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {words[0] for words in commands(said(tmp_path, monkeypatch))} <= MODULES.keys()
