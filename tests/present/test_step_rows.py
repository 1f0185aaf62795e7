"""Every site of a step, both runs next to each other."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.made_up import BATCH, FC, HEAD, Compared, at, record, scaled
from traindiff.analyse.compare import Comparison
from traindiff.cli.commands import app
from traindiff.errors import ConfigError
from traindiff.present.data.step_rows import COLUMNS, StepRow, parse_table, print_rows, step_rows, write_rows

doubled = at(FC, lambda values: values * 2, step=1)


def rows(result: Comparison, table: str = "first") -> list[StepRow]:
    assert result.history is not None
    return step_rows(result, result.history, parse_table(table))


def printed(found: list[StepRow]) -> str:
    console = Console(width=160, file=io.StringIO(), highlight=False)
    print_rows(console, found)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_step_of_the_first_divergence_is_shown_in_execution_order_and_marked(compared: Compared) -> None:
    result = compared(doubled, history=True)

    found = rows(result)

    assert {row.step for row in found} == {1}
    phases = [row.key.phase for row in found]
    assert phases.index("batch") < phases.index("forward") < phases.index("backward") < phases.index("grad")
    (first,) = [row for row in found if row.first]
    assert (first.key.phase, first.key.path, first.word) == ("forward", "fc", "above")
    assert first.candidate == pytest.approx(2 * first.baseline)
    assert first.ratio == pytest.approx(first.difference / first.floor)
    assert "above (first)" in printed(found)


def test_each_row_has_a_word_of_its_own(compared: Compared) -> None:
    edit = at(FC, lambda values: values * np.float32(1 + 3e-7), step=1)
    result = compared(edit, history=True)

    words = {(row.key.phase, row.key.path): row.word for row in rows(result, "1")}

    assert words["forward", "fc"] == "within"
    assert words["forward", "head"] == "identical"


def test_what_comes_after_another_batch_follows_from_it(compared: Compared) -> None:
    result = compared(
        lambda step, sites: (scaled(BATCH, 0.5)(step, sites), scaled(HEAD, 0.5)(step, sites)), history=True
    )

    found = {(row.key.phase, row.key.path): row for row in rows(result, "0")}

    assert found["batch", ""].word == "above"
    assert found["forward", "head"].word == "follows"
    assert "1 above their floors, 1 that follow from the first divergence" in printed(list(found.values()))


def test_without_a_divergence_the_first_step_is_shown(compared: Compared) -> None:
    found = rows(compared(history=True))

    assert {row.step for row in found} == {0}
    assert {row.word for row in found} == {"identical"}
    assert not any(row.first for row in found)


def test_each_step_has_a_table(compared: Compared) -> None:
    text = printed(rows(compared(doubled, history=True), "0-1"))

    assert text.index("Step 0:") < text.index("Step 1:")
    assert "0 above their floors" in text


def test_as_comma_separated_values_it_is_read_again(compared: Compared) -> None:
    found = rows(compared(doubled, history=True), "0,1")
    file = io.StringIO()
    write_rows(file, found)

    read = list(csv.DictReader(io.StringIO(file.getvalue())))

    assert tuple(read[0]) == COLUMNS
    assert [row["step"] for row in read] == [str(row.step) for row in found]
    for one, other in zip(read, found, strict=True):
        assert one["word"] == other.word
        if math.isfinite(other.baseline):
            assert float(one["baseline"]) == pytest.approx(other.baseline)
    assert [row["site"] for row in read if row["first"] == "True"] == ["fc"]


def test_steps_that_were_not_compared_are_refused(compared: Compared) -> None:
    result = compared(doubled, history=True)

    with pytest.raises(ConfigError, match=r"names no step that was compared \(0 to 2\)"):
        rows(result, "7")
    with pytest.raises(ConfigError, match="is not a step or a range of steps"):
        parse_table("x")
    assert result.history is not None
    result.history.whole.width = 2
    with pytest.raises(ConfigError, match="is for single steps, and 3 were compared"):
        rows(result, "1")


def test_the_command_prints_it_behind_the_verdict(tmp_path: Path) -> None:
    runs = [str(record(tmp_path / "baseline")), str(record(tmp_path / "candidate", doubled))]

    text = CliRunner().invoke(app, ["compare", *runs, "--table", "first"])
    table = CliRunner().invoke(app, ["compare", *runs, "--table", "1", "--format", "csv"])
    other = CliRunner().invoke(app, ["compare", *runs, "--table", "1", "--json"])

    assert (text.exit_code, table.exit_code, other.exit_code) == (1, 1, 2)
    assert text.stdout.index("First divergence") < text.stdout.index("Step 1:")
    assert table.stdout.splitlines()[0] == ",".join(COLUMNS)
    assert "is no part of --format json" in other.stderr
