"""A verdict as comma-separated values: a row for each site of a comparison, or each finding of a check."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import IO, Any

from traindiff.analyse.check import Verdict
from traindiff.analyse.compare import Comparison, SiteDifference, Verification
from traindiff.analyse.compare.investigation import Matrix
from traindiff.analyse.findings import Finding
from traindiff.core.site import ROOT
from traindiff.present.data.csv_rows import CsvRows

COLUMNS = (
    "step", "micro_step", "rank", "phase", "stage", "site", "slot", "call", "kind", "difference", "floor", "ratio",
    "num_steps", "num_identical_steps", "message",
)  # fmt: skip
"""Columns of every table, in order. Cells without a value, and sizes that are not finite, are empty."""


MATRIX_COLUMNS = ("name", "verdict", "message", "seconds", "output", "exit_code", "kept")
"""Columns of the table of a matrix, in order."""


def write(result: Comparison | Verification | Verdict | Matrix, file: IO[str]) -> None:
    """A header, then rows in the order of execution.

    Of a comparison each site has a row with its largest difference in units of its floor, in `step`: `num_steps` in
    which it was compared, `num_identical_steps` of them with the same bits, and `kind` and `message` of the first
    finding there, if there is one. Further findings there, and those at sites that only one run has, follow.
    Of a verification this is the comparison of the free runs. Of a check each finding has a row, then each
    warning, and `num_steps` are those in which it was found. Of a matrix each combination has a row, with
    columns of its own.
    """
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
        "call": row.call, "difference": _finite(row.difference), "floor": _finite(row.floor),
        "ratio": _finite(row.ratio), "num_steps": row.num_steps, "num_identical_steps": row.num_identical_steps,
    }  # fmt: skip


def _of_finding(finding: Finding) -> dict[str, Any]:
    about = finding.to_json()
    return {name: about[name] for name in COLUMNS if name in about} | {"num_steps": finding.evidence.get("num_steps")}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
