"""Copies of a tied parameter that disagree are named as each rank names them."""

from __future__ import annotations

import pytest

from traindiff.analyse.compare.explanations import with_names
from traindiff.analyse.findings import Finding

COPIES = {1: {"head.weight": "wte.weight", "other.weight": "fc.weight"}, 3: {"tail.weight": "wte.weight"}}


def finding(kind: str = "ranks-disagree", phase: str = "grad", path: str = "wte.weight") -> Finding:
    return Finding(step=0, phase=phase, path=path, slot="grad", order=0, kind=kind, message="They disagree.")


@pytest.mark.parametrize(
    ("phase", "why"),
    [("grad", " Are the gradients of a tied parameter added up over the ranks that have it?"), ("param", "")],
)
def test_other_names_are_said(phase: str, why: str) -> None:
    assert with_names(finding(phase=phase), COPIES).message == (
        f"They disagree. (rank 1 calls it head.weight, rank 3 calls it tail.weight.){why}"
    )


def test_names_are_compared_as_the_baseline_has_them() -> None:
    renamed = with_names(finding(path="model.wte.weight"), COPIES, lambda path: f"model.{path}")

    assert "rank 1 calls it head.weight" in renamed.message


@pytest.mark.parametrize("given", [finding(kind="scale"), finding(path="norm.weight")])
def test_other_findings_are_left_as_they_are(given: Finding) -> None:
    assert with_names(given, COPIES) is given
