"""A verdict as comma-separated values."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import numpy as np

import traindiff
from tests.made_up import Compared, Seen, Step, at, random, record
from traindiff.analyse.check import Verdict
from traindiff.analyse.compare import Comparison, Verification
from traindiff.analyse.compare.verification import SideOfVerification
from traindiff.compat.msprobe import tables
from traindiff.present.data.as_csv import COLUMNS, write
from traindiff.present.data.observations import Filter, write_csv
from traindiff.present.data.observations import rows as observation_rows
from traindiff.present.data.step_rows import step_rows, write_rows
from traindiff.storage import open_recording


def rows(result: Comparison | Verification | Verdict) -> list[dict[str, str]]:
    """The table as a program reads it."""
    file = io.StringIO(newline="")
    write(result, file)
    reader = csv.DictReader(io.StringIO(file.getvalue(), newline=""))
    found = list(reader)
    assert tuple(reader.fieldnames or ()) == COLUMNS
    return found


doubled = at(("grad", "", "fc.weight", "grad"), lambda values: values * 2, step=1)


def test_each_site_of_a_comparison_has_a_row_in_the_order_of_execution(compared: Compared) -> None:
    result = compared(doubled)

    found = rows(result)

    assert len(found) == len(result.differences)
    assert [(row["phase"], row["slot"]) for row in found] == [(one.phase, one.slot) for one in result.differences]
    assert all(float(row["difference"]) == one.difference for row, one in zip(found, result.differences, strict=True))


def test_the_row_of_a_site_says_what_was_found_there(compared: Compared) -> None:
    result = compared(doubled)

    (row,) = [row for row in rows(result) if row["site"] == "fc.weight" and row["phase"] == "grad"]

    first = result.first_divergence
    assert first is not None
    assert (row["kind"], row["message"], row["step"]) == (first.kind, first.message, "1")
    assert float(row["ratio"]) == first.ratio


def test_a_finding_at_a_site_that_one_run_lacks_has_a_row_too(compared: Compared) -> None:
    def lacks(_number: int, step: Step) -> None:
        del step["forward", "", "head", "output[0]"]

    (row,) = [row for row in rows(compared(lacks)) if row["kind"] == "missing"]

    assert (row["phase"], row["site"], row["difference"]) == ("forward", "head", "")


def test_each_of_two_findings_at_one_site_has_a_row(compared: Compared) -> None:
    result = compared(doubled)
    (finding,) = result.findings
    further = replace(finding, kind="reported-norm", message='One more,\nwith "quotes".', step=2)

    found = rows(replace(result, findings=(finding, further)))

    assert len(found) == len(result.differences) + 1
    assert [row["message"] for row in found if row["message"]] == [finding.message, further.message]
    assert (found[-1]["kind"], found[-1]["step"], found[-1]["site"]) == ("reported-norm", "2", "fc.weight")


def test_sizes_that_are_not_finite_are_empty_cells(compared: Compared) -> None:
    broken = at(("forward", "", "fc", "output[0]"), lambda values: np.where(values == values[0, 0], np.nan, values))

    (row,) = [row for row in rows(compared(broken)) if row["kind"] == "non-finite"]

    assert (row["difference"], row["ratio"]) == ("", "")
    assert float(row["floor"]) > 0


def test_of_a_verification_the_free_runs_are_written(compared: Compared) -> None:
    comparison = compared(doubled)
    sides = [SideOfVerification(recipe=recipe, setup={}, message="") for recipe in ("plain", "doubled")]
    verification = Verification(comparison=comparison, sides=(sides[0], sides[1]), output="runs")

    assert rows(verification) == rows(comparison)


def test_each_finding_of_a_check_has_a_row(tmp_path: Path) -> None:
    for rank in range(3):
        record(tmp_path / "run", doubled if rank == 1 else lambda number, step: None, rank=rank, run={"world_size": 3})

    result = traindiff.check(tmp_path / "run")
    (row,) = rows(result)

    assert (row["kind"], row["rank"], row["site"], row["num_steps"]) == ("ranks-disagree", "1", "fc.weight", "1")
    assert row["message"] == result.findings[0].message


def test_ends_of_lines_in_names_end_no_row(compared: Compared) -> None:
    def odd(_step: int, sites: Step) -> None:
        for number, path in enumerate(("a\rb", "a\r\nb", 'a,"b"\n')):
            sites["forward", "", path, "output[0]"] = Seen(values=random(5, 6, seed=number))

    result = compared(odd, baseline_edit=odd, history=True)
    names = {r"a\rb", r"a\r\nb", r'a,"b"\n'}
    assert names <= {row["site"] for row in rows(result)}

    assert result.history is not None
    file = io.StringIO(newline="")
    write_rows(file, step_rows(result, result.history, None))
    assert names <= {row["site"] for row in csv.DictReader(io.StringIO(file.getvalue(), newline=""))}


FORMULA = '=HYPERLINK("http://e.example/?x","click; or -1")'


def cells(text: str) -> list[str]:
    """All cells of a table."""
    return [cell for row in csv.reader(io.StringIO(text, newline="")) for cell in row]


def test_no_table_has_a_cell_that_a_spreadsheet_computes(compared: Compared, tmp_path: Path) -> None:
    names = (FORMULA, "+a.weight", "-a", "@a", "\uff1da", "a;=1")

    def odd(_step: int, sites: Step) -> None:
        for number, path in enumerate(names):
            sites["forward", "", path, "output[0]"] = Seen(values=random(5, 6, seed=number))
            sites["optimizer", "", path, "=slot"] = Seen(values=np.array(-1.5))

    def parted(step: int, sites: Step) -> None:
        odd(step, sites)
        for path in names:
            sites["forward", "", path, "output[0]"].values[:] = np.nan

    result = compared(parted, baseline_edit=odd, history=True)
    recording = open_recording(str(record(tmp_path / "odd", parted)))
    files = [io.StringIO(newline="") for _ in range(4)]
    write(result, files[0])
    assert result.history is not None
    write_rows(files[1], step_rows(result, result.history, None))
    write_csv(observation_rows(recording, Filter()), files[2])
    write(traindiff.check(tmp_path / "odd"), files[3])

    for number, file in enumerate(files):
        found = cells(file.getvalue())
        assert f"'{FORMULA}" in found
        if number < 3:  # a check has the first finding alone
            assert {"'+a.weight", "a;'=1"} <= {*found}
        begins = [cell for cell in found if cell.startswith(("=", "+", "-", "@", "\uff1d"))]
        assert all(float(cell) for cell in begins)
    assert "-1.5" in cells(files[1].getvalue())


def test_a_table_of_msprobe_has_ordinary_names_as_they_are_and_gives_back_every_name() -> None:
    columns = tables.Columns()
    ordinary, odd = (
        tables.Row(name=name, shape=(2,), maximum=1.0, minimum=-1.0, norm=1.4) for name in ("fc.w", FORMULA)
    )

    data = tables.dump(columns, [ordinary, odd])

    assert b"\r\nfc.w,1.0,-1.0,1.4,[2]\r\n" in data
    assert f"'{FORMULA}" in cells(data.decode("utf-8-sig"))
    assert tables.load(data, where="here").rows == (ordinary, odd)
