"""`traindiff compare`: what it prints where, and how it exits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.cli.conftest import GOLDEN, Traindiff
from traindiff.cli.commands import app


def test_equal_runs_exit_with_zero(traindiff: Traindiff) -> None:
    result = traindiff("compare", "baseline", "again")

    assert result.exit_code == 0
    assert result.stdout == "identical: every recorded tensor has the same bits, over 3 steps (0 to 2)\n"
    assert result.stderr == ""


def test_a_divergence_is_printed_and_exits_with_one(traindiff: Traindiff) -> None:
    result = traindiff("compare", "baseline", "candidate", "--top", "2")

    assert result.exit_code == 1
    assert [line.rstrip() for line in result.stdout.splitlines()] == [
        "diverged (uncalibrated): the numbers part, over 3 steps (0 to 2)",
        "",
        "First divergence: step 1, micro-step 0, grad, fc.weight grad",
        "  The candidate's is 2 x the baseline's.",
        "  relative L2 difference 1 = 2.59e+05 x its floor of 3.86e-06",
        "  First difference in bits: the same place.",
        "  more: traindiff explain scale",
        "",
        "27 sites: 5 identical, 1 above, 21 that follow from the first divergence.",
        "",
        "Above their floors, in execution order",
        "phase  site            at step  difference    floor  x floor",
        "grad   fc.weight grad        1           1  3.9e-06  2.6e+05",
        "and 21 that follow, 5 identical",
        "",
        "Not judged after the first divergence: grad of (all parameters) norm, from step 1 on, and 13 more sites. What "
        "precedes them differs by so much that even a lost tensor would not stand out. Mend the first divergence, and "
        "compare again.",
    ]


def test_without_rows_there_are_no_tables(traindiff: Traindiff) -> None:
    assert "Largest" not in traindiff("compare", "baseline", "candidate", "--top", "0").stdout


def test_json_is_all_that_is_on_standard_output(traindiff: Traindiff) -> None:
    result = traindiff("compare", "baseline", "candidate", "--json")

    found = json.loads(result.stdout)
    assert result.exit_code == 1
    assert found["schema"] == {"name": "traindiff-comparison", "version": 1}
    assert (found["baseline"], found["candidate"]) == ("baseline", "candidate")
    assert found["first_divergence"]["site"] == "fc.weight"
    assert "differences" not in found


def test_chosen_steps_may_agree(traindiff: Traindiff) -> None:
    assert traindiff("compare", "baseline", "candidate", "--steps", "0").exit_code == 0


def test_a_tolerance_replaces_the_floors(traindiff: Traindiff) -> None:
    assert traindiff("compare", "baseline", "candidate", "--rtol", "2").exit_code == 0


def test_a_candidate_without_steps_is_incomplete_and_exits_with_three(traindiff: Traindiff, tmp_path: Path) -> None:
    candidate = Path(shutil.copytree(GOLDEN / "candidate", tmp_path / "c"))
    for name in ("observations.arrows", "observations.crc"):
        (candidate / "rank-00000" / name).unlink()

    result = traindiff("compare", "baseline", str(candidate))

    assert result.exit_code == 3
    assert result.stdout.startswith("incomplete: nothing could be compared\n")
    assert "has no finished step among those asked for" in result.stdout


def test_another_model_is_incomplete_and_exits_with_three(traindiff: Traindiff) -> None:
    result = traindiff("compare", "baseline", "again", "--rename", "head=other")

    assert result.exit_code == 3
    assert "Only in the baseline: head.weight value (param)" in result.stdout
    assert "If these are the same sites under other names: --rename PATTERN=REPLACEMENT." in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("nothing", "again"),
            "traindiff: nothing does not exist. Give the directory that traindiff.record(...) wrote.",
        ),
        (("baseline", "baseline/run.json"), "traindiff: baseline/run.json is a file. A recording is a directory"),
        (("baseline", "baseline/rank-00000"), "traindiff: baseline/rank-00000 holds no run.json"),
        (("baseline", "again", "--steps", "x"), "'x' is not a step or a range of steps."),
        (("baseline", "again", "--rtol", "-1"), "must be a number from 0 up."),
        (("baseline", "again", "--rename", "x"), 'has no "=".'),
    ],
)
def test_unusable_input_is_explained_on_standard_error_and_exits_with_two(
    traindiff: Traindiff, arguments: tuple[str, ...], message: str
) -> None:
    result = traindiff("compare", *arguments)

    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr


def test_a_newer_version_is_refused_with_both_versions(traindiff: Traindiff, tmp_path: Path) -> None:
    newer = Path(shutil.copytree(GOLDEN / "candidate", tmp_path / "newer"))
    about = json.loads((newer / "run.json").read_text())
    (newer / "run.json").write_text(json.dumps({**about, "version": 99}))

    result = traindiff("compare", "baseline", str(newer))

    assert result.exit_code == 2
    assert "has format version 99; this traindiff reads versions up to 1." in result.stderr
    assert "pip install --upgrade traindiff" in result.stderr


def test_damage_is_refused_with_its_place(traindiff: Traindiff, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(GOLDEN / "candidate", tmp_path / "damaged"))
    data = damaged / "rank-00000" / "observations.arrows"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)

    result = traindiff("compare", "baseline", str(damaged))

    assert result.exit_code == 2
    assert result.stdout == ""
    assert "observations.arrows is damaged: message 2" in result.stderr


def test_a_stream_that_was_cut_off_is_used_as_far_as_it_goes(traindiff: Traindiff, tmp_path: Path) -> None:
    cut = Path(shutil.copytree(GOLDEN / "again", tmp_path / "cut"))
    data = cut / "rank-00000" / "observations.arrows"
    data.write_bytes(data.read_bytes()[:-2000])

    result = traindiff("compare", "baseline", str(cut))

    assert result.exit_code == 3
    assert "over 2 steps (0 to 1)" in result.stdout
    assert "candidate: rank 0: observations.arrows was cut off" in result.stdout


def test_a_recording_is_needed_on_each_side(traindiff: Traindiff) -> None:
    assert traindiff("compare", "baseline").exit_code == 2


def test_a_verdict_is_written_as_csv(traindiff: Traindiff) -> None:
    result = traindiff("compare", "baseline", "candidate", "--format", "csv")

    header, *rows = result.stdout.splitlines()
    assert result.exit_code == 1
    assert header.startswith("step,evaluation,micro_step,rank,phase,stage,site,slot")
    assert any("The candidate's is 2 x the baseline's." in row for row in rows)


def test_an_unknown_format_names_those_there_are(traindiff: Traindiff) -> None:
    result = traindiff("compare", "baseline", "candidate", "--format", "xml")

    assert result.exit_code == 2
    assert "'xml' is not a format. Known: text, json, csv, markdown, junit." in result.stderr


@pytest.mark.parametrize("command", [("compare", "baseline", "again"), ("check", "baseline"), ("show", "baseline")])
def test_two_formats_at_once_are_refused(command: tuple[str, ...], traindiff: Traindiff) -> None:
    result = traindiff(*command, "--json", "--format", "csv")

    assert (result.exit_code, result.stdout) == (2, "")
    assert "--json --format csv\n    asks for two formats." in result.stderr


def test_a_format_on_the_command_line_counts_before_that_of_a_file_of_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "traindiff.toml").write_text("json = true\n")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["compare", str(GOLDEN / "baseline"), str(GOLDEN / "again"), "-f", "csv"])

    assert (result.exit_code, result.stdout.partition(",")[0]) == (0, "step")
