"""The tour runs as it says, and touches nothing but its own directory."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.warm_process import warm
from traindiff.cli.commands import app
from traindiff.errors import ConfigError
from traindiff.run.demo.tour import REPORT, STOPS, prepare


@pytest.mark.release
def test_the_tour_comes_to_its_end_and_names_the_report(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--tour", "-o", str(tmp_path / "tour")], catch_exceptions=False)

    assert result.exit_code == 0, result.output
    for number, stop in enumerate(STOPS, start=1):
        assert f"{number} of {len(STOPS)}. {stop.title}\n$ {shlex.join(stop.command)}\n" in result.stdout
    assert "was zero_grad() left out" in result.stdout
    assert "more: traindiff explain carried-gradient" in result.stdout
    assert "2 output holds infinity; what Linear was given is finite" in result.stdout
    report = (tmp_path / "tour" / REPORT).resolve()
    assert f"Open the report in a browser: {report}" in result.stdout
    assert report.stat().st_size > 10_000


def test_the_script_of_the_tour_trains_and_overflows(tmp_path: Path) -> None:
    prepare(tmp_path / "tour")
    healthy, overflowing = (
        warm("train.py", *options, cwd=tmp_path / "tour", env={"OMP_NUM_THREADS": "1"})
        for options in ((), ("--overflow",))
    )

    assert (healthy.returncode, healthy.stdout.count("loss")) == (0, 8)
    assert overflowing.returncode == 1
    assert "2 output holds infinity; what Linear was given is finite" in overflowing.stderr


def test_a_directory_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")

    with pytest.raises(ConfigError, match="holds files that are of no tour"):
        prepare(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_earlier_tour_is_replaced(tmp_path: Path) -> None:
    prepare(tmp_path / "tour")
    (tmp_path / "tour" / "base").mkdir()

    prepare(tmp_path / "tour")

    assert sorted(path.name for path in (tmp_path / "tour").iterdir()) == [".traindiff-tour", "train.py"]


def test_a_fault_is_of_the_demo_alone() -> None:
    result = CliRunner().invoke(app, ["demo", "--tour", "--fault", "lost-gradient"])

    assert result.exit_code == 2
    assert "--fault is of the demo without --tour" in result.stderr
