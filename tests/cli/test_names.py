"""No name in a recording is followed by a terminal, divides a row, or turns text around."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from typer.testing import CliRunner

from tests.hostile_names import DIVIDED, NAMES, REVERSED, ZERO, hostile, is_plain
from tests.made_up import at, both
from traindiff.cli.commands import app
from traindiff.present.data.observations import COLUMNS


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two recordings that part at each of the names."""
    changes = [at(("forward", "", name, f"output['{name}']"), lambda x: x * 2, step=1) for name in NAMES]
    broken = at(("grad", "", f"{DIVIDED}.weight", "grad"), lambda x: x * float("nan"), step=2)
    monkeypatch.chdir(tmp_path)
    hostile(Path("baseline"))
    hostile(Path("candidate"), both(*changes, broken))


def printed(*arguments: str) -> bytes:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code in (0, 1)
    return result.stdout_bytes + result.stderr_bytes


@pytest.mark.usefixtures("runs")
@pytest.mark.parametrize("form", ["text", "markdown", "csv", "json", "junit"])
def test_a_comparison_and_a_check_print_nothing_that_a_terminal_follows(form: str) -> None:
    for command in (["compare", "baseline", "candidate"], ["check", "candidate"]):
        text = printed(*command, "--format", form)
        assert is_plain(text)
    assert r"new\nline" in text.decode().replace("\\\\", "\\")


@pytest.mark.usefixtures("runs")
def test_the_table_of_a_step_and_the_list_of_a_recording_print_nothing_that_a_terminal_follows() -> None:
    for command in (["compare", "baseline", "candidate", "--table", "1"], ["show", "candidate", "--top", "500"]):
        text = printed(*command)
        assert is_plain(text)
        assert all(any(shown in line for line in text.decode().splitlines()) for shown in NAMES.values())


@pytest.mark.usefixtures("runs")
def test_a_site_is_chosen_by_its_name_as_it_is_and_as_it_is_shown() -> None:
    raw, shown = (printed("show", "baseline", "--site", name, "--format", "csv") for name in (ZERO, NAMES[ZERO]))
    rows = list(csv.reader(io.StringIO(raw.decode())))

    assert raw == shown
    assert is_plain(raw)
    assert len(rows) == len(raw.splitlines()) > 3
    assert {len(row) for row in rows} == {len(COLUMNS)}


@pytest.mark.usefixtures("runs")
def test_json_is_valid_and_has_the_names_as_they_are_shown() -> None:
    found = json.loads(printed("compare", "baseline", "candidate", "--json"))

    assert found["first_divergence"]["site"] == NAMES[REVERSED]


@pytest.mark.usefixtures("runs")
def test_rows_of_a_markdown_table_have_all_their_cells() -> None:
    text = printed("compare", "baseline", "candidate", "--format", "markdown").decode()
    (row,) = (line for line in text.splitlines() if line.startswith("| ") and "tick" in line)
    shown = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)

    assert row.count("|") == 6
    assert r"<code>new\nline|pipe`tick`\|.weight grad</code>" in shown


@pytest.mark.usefixtures("runs")
def test_a_page_shows_the_names_as_they_are_printed() -> None:
    printed("report", "baseline", "candidate", "--output", "page.html")
    page = Path("page.html").read_text(encoding="utf-8")

    assert REVERSED[0] not in page
    assert "\x1b" not in page
    assert NAMES[REVERSED] in page
