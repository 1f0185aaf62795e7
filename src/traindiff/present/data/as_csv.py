"""Results as comma-separated values, and the rows of every other table of such values.

Every reader divides a file into the same rows, and no spreadsheet finds a formula in it. A spreadsheet computes a cell
that begins with one of a few characters, e.g. `=HYPERLINK(...)` as the name of a module. So such a text gets a single
quote in front, as OWASP's page on CSV injection says (https://owasp.org/www-community/attacks/CSV_Injection). A
semicolon or a tab inside a text begins a cell where a spreadsheet divides rows there. Numbers are left as they are:
they are no formulas.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from traindiff.analyse.check import Verdict
from traindiff.analyse.compare import Comparison, SiteDifference, Verification
from traindiff.analyse.compare.investigation import Matrix
from traindiff.analyse.findings import Finding, finite
from traindiff.analyse.products import ProductTable, row_text
from traindiff.core.site import ROOT

COLUMNS = (
    "step", "evaluation", "micro_step", "rank", "phase", "stage", "site", "slot", "call", "kind", "word", "difference",
    "floor", "ratio", "num_steps", "num_identical_steps", "first_other_bits", "message",
)  # fmt: skip
"""Columns of every table, in order. Cells without a value, and sizes that are not finite, are empty."""


MATRIX_COLUMNS = ("name", "verdict", "message", "seconds", "output", "exit_code", "kept")
"""Columns of the table of a matrix, in order."""


PRODUCT_COLUMNS = (
    "phase", "operator", "output", "line", "format", "terms", "num_products", "error", "allowed", "ratio", "worst_row",
    "path", "step", "row",
)  # fmt: skip
"""Columns of the table of products, in order."""


def write(result: Comparison | Verification | Verdict | Matrix | ProductTable, file: IO[str]) -> None:
    """Write a header, then one row for each site, finding or combination.

    A comparison has a row for each site, in execution order. The row has the difference that weighs most, with its
    `word` (see `SITE_WORDS`), and the `step` of this difference. `num_steps` counts the steps in which the site was
    compared, and `num_identical_steps` those with the same bits; `first_other_bits` is the first step with other bits.
    `kind` and `message` are those of the first finding at the site, if
    there is one. Rows for further findings, and for findings at sites that only one run has, follow at the end. A
    verification has the rows of the comparison of its free runs. A check has a row for each finding, then for each
    warning; `num_steps` counts the steps in which it was found. A matrix has a row for each combination, and
    a table of products one for each operator and line; both have other columns.
    """
    if isinstance(result, ProductTable):
        table = CsvRows(file, PRODUCT_COLUMNS)
        for product in result:
            table.write(product.to_json() | {"row": row_text(product.row)})
        return
    if isinstance(result, Matrix):
        table = CsvRows(file, MATRIX_COLUMNS)
        for row in result.rows:
            table.write(row.to_json())
        return
    writer = CsvRows(file, COLUMNS)
    if isinstance(result, Verdict):
        for finding in (*result.findings, *result.warnings):
            writer.write(_of_finding(finding))
    else:
        for site in _rows(result.comparison if isinstance(result, Verification) else result):
            writer.write(site)


def _rows(comparison: Comparison) -> Iterator[dict[str, Any]]:
    """Rows of a comparison."""
    first = {_site(finding): finding for finding in reversed(comparison.findings)}
    sites = {_site(row) for row in comparison.differences}
    for row in comparison.differences:
        finding = first.get(_site(row))
        found = {} if finding is None else {"kind": finding.kind, "message": finding.message}
        yield _of_site(row) | found
    for finding in comparison.findings:
        if _site(finding) not in sites or first[_site(finding)] is not finding:
            yield _of_finding(finding)


def _site(one: SiteDifference | Finding) -> tuple[object, ...]:
    return one.phase, one.stage, one.path, one.slot, one.call


def _of_site(row: SiteDifference) -> dict[str, Any]:
    return {
        "step": row.step, "phase": row.phase, "stage": row.stage, "site": row.path or ROOT, "slot": row.slot,
        "call": row.call, "word": row.word, "difference": finite(row.difference), "floor": finite(row.floor),
        "ratio": finite(row.ratio), "num_steps": row.num_steps, "num_identical_steps": row.num_identical_steps,
        "first_other_bits": row.first_other_bits,
    }  # fmt: skip


def _of_finding(finding: Finding) -> dict[str, Any]:
    about = finding.to_json()
    return {name: about[name] for name in COLUMNS if name in about} | {"num_steps": finding.evidence.get("num_steps")}


_BEGINS = "[=+\\-@\uff1d\uff0b\uff0d\uff20]"
_PLACE = re.compile(f"^(?='*(?:[\t\r\n]|\\s*{_BEGINS}))|(?<=[;\t])(?='*{_BEGINS})")
_QUOTED_PLACE = re.compile(f"^'(?='*(?:[\t\r\n]|\\s*{_BEGINS}))|(?<=[;\t])'(?='*{_BEGINS})")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def defused(text: str) -> str:
    """The text that a cell gets: with a single quote wherever a formula would begin. Numbers do not change."""
    return text if _NUMBER.fullmatch(text) else _PLACE.sub("'", text)


def restored(text: str) -> str:
    """The original text, from the text that `defused` returned."""
    return _QUOTED_PLACE.sub("", text)


class CsvRows:
    """A header, and then rows; each ends in a line feed."""

    def __init__(self, file: IO[str], columns: Sequence[str]) -> None:
        self._writer = csv.writer(_Lines(file))
        self._columns = columns
        self._writer.writerow(columns)

    def write(self, row: Mapping[str, Any]) -> None:
        """Write a row of cells by column. A column that it lacks is empty, and so is a cell that is None."""
        cells = (row.get(name) for name in self._columns)
        self._writer.writerow([defused(cell) if isinstance(cell, str) else cell for cell in cells])


class _Lines:
    """A file for `csv.writer`, in which each row ends in a line feed.

    `csv` quotes the carriage return in a cell only where rows end in one, and readers take it for the end of a row.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, row: str) -> int:
        """Write a row, which `csv` ends in a carriage return and a line feed."""
        return self._file.write(row.removesuffix("\r\n") + "\n")
