"""What README.md and docs/report.md show is what the commands print now."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.examples.readme import block, of_any_machine
from tests.examples.symptom_pages import ROOT
from traindiff.analyse.check import RULES
from traindiff.cli.commands import app
from traindiff.run.demo.faults import FAULTS

README = ROOT / "README.md"
COMPARE = "traindiff compare traindiff-demo/baseline traindiff-demo/faulty-lost-gradient"


def test_numbers_in_the_readme_are_those_of_the_code() -> None:
    text = " ".join(README.read_text(encoding="utf-8").split())

    assert re.findall(r"\[(\d+) rules\]", text) == [str(len(RULES))]
    assert re.findall(r"shows (\d+) other faults", text) == [str(len(FAULTS) - 1)]


def test_only_numbers_of_a_machine_are_left_out() -> None:
    line = "  relative L2 difference 0.273 = 1.73e+04 x its floor of 1.57e-05\nstep 2 of 8"

    assert of_any_machine(line) == "  relative L2 difference # = # x its floor of #\nstep 2 of 8"


@pytest.mark.release
def test_the_demo_prints_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["demo"], catch_exceptions=False).exit_code == 0

    for page, command in (
        (README, f"{COMPARE} --top 0"),
        (ROOT / "docs" / "report.md", f"{COMPARE} --format markdown"),
    ):
        printed = CliRunner().invoke(app, command.split()[1:]).stdout
        assert of_any_machine(block(page, command)) == of_any_machine(printed)
