"""The first divergence says how far inputs agree, and where it may show one hop late."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.made_up import CONTENT, Compared, Seen, Step, at, random, record
from traindiff.comparison import compare

HEAD = ("forward", "", "head", "output[0]")


def test_the_last_site_before_it_is_named(compared: Compared) -> None:
    first = compared(at(HEAD, lambda x: x * np.float32(1.5))).first_divergence

    assert first is not None
    assert first.evidence["after"] == "fc output[0]"
    assert "one hop late" not in first.says


def test_a_gradient_of_a_parameter_follows_from_no_site_in_particular(compared: Compared) -> None:
    first = compared(at(("grad", "", "fc.weight", "grad"), lambda x: -x)).first_divergence

    assert first is not None
    assert "after" not in first.evidence


def test_what_a_fused_kernel_hides_shows_one_hop_late(tmp_path: Path) -> None:
    """The baseline has an activation between two layers, the candidate computes it inside of another kernel."""

    def with_activation(step: int, sites: Step) -> None:
        act = Seen(values=random(5, 8, seed=77))
        sites.update({("forward", "", "act", "output[0]"): act, HEAD: sites.pop(HEAD)})

    content = {**CONTENT, "modules": {**CONTENT["modules"], "act": "GELU"}}
    baseline = record(tmp_path / "baseline", with_activation, content=content)
    comparison = compare(baseline, record(tmp_path / "candidate", at(HEAD, lambda x: x * np.float32(1.5))))

    first = comparison.first_divergence
    assert first is not None
    assert (first.path, first.evidence["one_hop_late"]) == ("head", ["act output[0]"])
    assert "the candidate did not observe 1 site that the other run has (act output[0])" in first.says
    assert "one hop late" in first.says
