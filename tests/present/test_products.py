"""How exact matrix products are, as text, JSON, Markdown, comma-separated values and a page."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import traindiff.cli.commands  # noqa: F401  declares the commands
from tests.cli.test_json_schemas import assert_fits
from tests.made_up import record
from tests.present.recorded_products import with_products, wrong
from tests.present.test_page import Elements
from traindiff.analyse.check import check
from traindiff.cli.app import app
from traindiff.present.data.as_csv import PRODUCT_COLUMNS


def printed(*arguments: str, exit_code: int = 0) -> str:
    result = CliRunner().invoke(app, ["check", *arguments], env={"COLUMNS": "300"})
    assert result.exit_code == exit_code, result.output
    return result.stdout


@pytest.fixture
def run(tmp_path: Path) -> str:
    return with_products(tmp_path / "run")


def test_the_table_has_a_row_for_each_operator_line_and_format(run: str) -> None:
    found = check(run).products

    assert found is not None
    assert [(row.phase, row.operator, row.output, row.num_products) for row in found] == [
        ("forward", "aten.addmm", "output[0]", 3),
        ("backward", "aten.convolution_backward", "output[0]", 3),
        ("backward", "aten.convolution_backward", "output[1]", 3),
    ]
    first = next(iter(found))
    assert (first.line, first.format) == (
        "model.py:12: x = self.fc(x) | self.gate(x)", "bfloat16 x bfloat16 -> bfloat16"
    )  # fmt: skip
    assert (first.error, first.allowed, first.ratio, first.terms) == (2e-3, 4e-3, 0.5, 64)
    assert (first.residual, first.row, first.step, first.path) == (0.77, (1,), 2, "fc/aten.addmm[0]")


def test_the_notes_say_how_many_were_checked_and_which_were_not(run: str) -> None:
    assert check(run).notes == (
        "9 matrix products and convolutions were checked: traindiff check --products lists their errors.",
        "Not checked: aten._scaled_dot_product_flash_attention (3 calls): its products are inside the kernel, which "
        "does not return the attention weights.",
    )


def test_the_terminal_shows_the_table_where_it_is_asked_for(run: str) -> None:
    plain, listed = printed(run), printed(run, "--products")

    assert listed.startswith(plain)
    lines = [line.rstrip() for line in listed.removeprefix(plain).splitlines()]
    assert lines[1] == "Matrix products and convolutions"
    assert lines[2].split()[:4] == ["phase", "operator", "called", "from"]
    assert lines[3].split()[:2] == ["forward", "aten.addmm"]
    assert "64         3  0.002    0.004        0.5  0.77 x in row 1 of fc/aten.addmm[0]," in lines[3]
    assert "aten.convolution_backward output[1]" in listed


def test_a_run_without_products_says_how_to_record_them(tmp_path: Path) -> None:
    record(tmp_path / "run")

    result = CliRunner().invoke(app, ["check", str(tmp_path / "run"), "--products"])

    assert (result.exit_code, result.stdout) == (2, "")
    assert 'record(observe=["products"], steps="0-1")' in result.stderr
    assert check(tmp_path / "run").products is None


def test_json_has_the_table_and_fits_its_schema(run: str) -> None:
    found = json.loads(printed(run, "--json"))

    assert_fits(found, "check")
    assert [row["num_products"] for row in found["products"]["rows"]] == [3, 3, 3]
    assert found["products"]["rows"][0]["row"] == [1]
    assert found["products"]["not_checked"] == [
        {
            "operator": "aten._scaled_dot_product_flash_attention", "count": 3,
            "reason": "its products are inside the kernel, which does not return the attention weights",
            "path": "fc/aten._scaled_dot_product_flash_attention[0]",
        }
    ]  # fmt: skip


def test_values_separated_by_commas_are_the_table(run: str) -> None:
    reader = csv.DictReader(io.StringIO(printed(run, "--products", "--format", "csv"), newline=""))
    found = list(reader)

    assert tuple(reader.fieldnames or ()) == PRODUCT_COLUMNS
    assert [(row["operator"], row["num_products"], row["row"]) for row in found] == [
        ("aten.addmm", "3", "row 1"), ("aten.convolution_backward", "3", "row 1"),
        ("aten.convolution_backward", "3", "row 1"),
    ]  # fmt: skip
    assert float(found[0]["worst_row"]) == 0.77


def test_markdown_has_the_rows_furthest_from_what_their_formats_allow_first(run: str) -> None:
    lines = printed(run, "--format", "markdown").splitlines()

    start = lines.index("<details><summary>Matrix products and convolutions, by operator and line: 3</summary>")
    assert lines[start + 2].startswith("| phase | operator | called from | format |")
    assert lines[start + 4].startswith("| forward | aten.addmm | model.py:12: x = self.fc(x) &#124; self.gate(x) |")


def test_the_page_has_the_table(run: str, tmp_path: Path) -> None:
    printed(run, "--html", str(tmp_path / "page.html"))

    page = Elements((tmp_path / "page.html").read_text())
    assert ("id", "products-title") in page.attributes
    assert "model.py:12: x = self.fc(x) | self.gate(x)" in page.texts
    assert "0.77 x in row 1 of fc/aten.addmm[0], step 2" in page.texts


def test_a_wrong_row_is_found_without_the_framework(tmp_path: Path) -> None:
    verdict = check(with_products(tmp_path / "run", wrong))

    (found,) = verdict.findings
    assert (found.kind, found.step, found.path, found.evidence["row"]) == ("product-wrong", 1, "fc/aten.addmm[0]", [0])
    assert found.message == (
        "fc/aten.addmm[0] is not the product of its inputs in row 0, where it is 1e+03 x as far from it as rounding "
        "explains (bfloat16 x bfloat16 -> bfloat16). Most of its 3 rows are right. Called from model.py:12: "
        "x = self.fc(x) | self.gate(x)"
    )


def test_steps_that_are_not_asked_for_are_left_out(tmp_path: Path) -> None:
    found = check(with_products(tmp_path / "run", wrong), steps="2")

    assert found.verdict == "healthy"
    assert found.products is not None
    assert {row.num_products for row in found.products} == {1}
