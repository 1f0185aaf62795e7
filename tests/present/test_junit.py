"""A verdict as JUnit XML."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from tests.made_up import BATCH, FC, Compared, Seen, Step, at, record
from tests.present.hostile import hostile_pair
from tests.present.test_markdown import SIDES
from traindiff.analyse.check import Verdict, check
from traindiff.analyse.compare import Comparison, Pinned, Verification, compare
from traindiff.analyse.compare.investigation import Matrix, MatrixRow
from traindiff.present.data.as_junit import write


def suite(result: Comparison | Verification | Verdict | Matrix) -> ElementTree.Element:
    file = io.StringIO()
    write(result, file)
    (found,) = ElementTree.fromstring(file.getvalue().encode())
    cases = list(found)
    assert int(found.get("tests", "")) == len(cases)
    for how in ("failure", "error"):
        assert int(found.get(f"{how}s", "")) == sum(case.find(how) is not None for case in cases)
    return found


def outcomes(result: Comparison | Verification | Verdict | Matrix) -> dict[str, str]:
    return {
        case.get("name", ""): "".join(child.tag for child in case if child.tag != "system-out")
        for case in suite(result)
    }


def test_equal_runs_pass_in_every_phase(compared: Compared) -> None:
    found = outcomes(compared())

    assert list(found) == ["verdict", "batch", "forward", "backward", "grad", "optimizer", "update", "param"]
    assert set(found.values()) == {""}


def test_a_phase_with_findings_fails_and_says_them(compared: Compared) -> None:
    result = compared(at(FC, lambda values: values * 2, step=1))
    found = outcomes(result)

    assert {name for name, how in found.items() if how} == {"verdict", "forward"}
    failure = suite(result).find("testcase[@name='forward']/failure")
    assert failure is not None
    assert (
        failure.get("message") == "step 1, micro-step 0, forward, fc output[0]: The candidate's is 2 x the baseline's."
    )


def test_runs_that_were_given_other_things_to_compute_are_an_error(compared: Compared) -> None:
    assert outcomes(compared(at(BATCH, lambda values: values + 1)))["verdict"] == "error"


def test_findings_of_a_check_fail_one_by_one(tmp_path: Path) -> None:
    def frozen(_step: int, sites: Step) -> None:
        sites["param", "", "fc.weight", "value"] = Seen(values=np.ones((8, 6), np.float32))

    result = check(record(tmp_path / "run", frozen))
    found = outcomes(result)

    assert (found.pop("verdict") == "failure") == (result.verdict == "unhealthy")
    assert len(found) == len(result.findings)


def test_what_was_pinned_down_is_a_case_of_its_own(compared: Compared) -> None:
    result = compared(at(FC, lambda values: values * 2, step=1))
    verification = Verification(
        comparison=result, sides=SIDES, output="out", pinned=(Pinned(step=1, precision="float32", comparison=result),)
    )

    assert [name for name in outcomes(verification) if name.startswith("pinned")] != []


def test_a_verdict_that_is_worse_than_that_of_the_free_runs_says_both(compared: Compared) -> None:
    wrong = compared(at(FC, lambda values: values * 2, step=1))
    verification = Verification(
        comparison=compared(), sides=SIDES, output="out", pinned=(Pinned(step=1, precision="native", comparison=wrong),)
    )
    failure = suite(verification).find("testcase[@name='verdict']/failure")

    assert failure is not None
    assert failure.get("message", "").startswith("diverged; the free runs are identical: every recorded tensor")
    assert failure.get("message", "") in str(verification).splitlines()


def test_each_combination_of_a_matrix_is_a_case() -> None:
    row = MatrixRow(
        name="dtype=float32", varied={}, verdict="identical", message="", seconds=1, output="out/1", exit_code=0
    )
    words = {"identical": "", "diverged": "failure", "incomplete": "error", "refused": "error", "impossible": "skipped"}
    rows = tuple(replace(row, name=word, verdict=word) for word in words)

    assert outcomes(Matrix(recipe="recipe", output="out", rows=rows)) == words


def test_names_that_xml_cannot_hold_are_written_without_what_it_cannot(tmp_path: Path) -> None:
    text = "".join(suite(compare(*hostile_pair(tmp_path))).itertext())

    assert "<script>alert(1)</script>" in text
    assert "\x1b" not in text
