"""The first divergence says how far inputs agree, and where it may show one hop late."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.analyse.merge.test_step_table import only, part
from tests.made_up import CONTENT, Array, Compared, Edit, Seen, Site, Step, at, random, record
from traindiff.analyse.align.pairs import Aligned
from traindiff.analyse.compare import compare
from traindiff.analyse.compare.explanations import surroundings, unreached_positions_message
from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.distance import Pair

HEAD = ("forward", "", "head", "output[0]")


def test_the_last_site_before_it_is_named(compared: Compared) -> None:
    first = compared(at(HEAD, lambda x: x * np.float32(1.5))).first_divergence

    assert first is not None
    assert first.evidence["after"] == "fc output[0]"
    assert "one hop late" not in first.message


def test_a_gradient_of_a_parameter_follows_from_no_site_in_particular(compared: Compared) -> None:
    first = compared(at(("grad", "", "fc.weight", "grad"), lambda x: -x)).first_divergence

    assert first is not None
    assert "after" not in first.evidence


def test_what_a_fused_kernel_hides_shows_one_hop_late(tmp_path: Path) -> None:
    """The baseline has an activation between two layers, the candidate computes it inside of another kernel."""

    def with_activation(_step: int, sites: Step) -> None:
        act = Seen(values=random(5, 8, seed=77))
        sites.update({("forward", "", "act", "output[0]"): act, HEAD: sites.pop(HEAD)})

    content = {**CONTENT, "modules": {**CONTENT["modules"], "act": "GELU"}}
    baseline = record(tmp_path / "baseline", with_activation, content=content)
    comparison = compare(baseline, record(tmp_path / "candidate", at(HEAD, lambda x: x * np.float32(1.5))))

    first = comparison.first_divergence
    assert first is not None
    assert (first.path, first.evidence["one_hop_late"]) == ("head", ["act output[0]"])
    assert "the candidate did not observe 1 site that the other run has (act output[0])" in first.message
    assert "one hop late" in first.message


def before(site: Site, *more: Site) -> Edit:
    """Further sites, just before one."""

    def edit(_step: int, sites: Step) -> None:
        held = dict(sites)
        sites.clear()
        for one, seen in held.items():
            if one == site:
                sites.update({other: Seen(values=random(5, 8, seed=77)) for other in more})
            sites[one] = seen

    return edit


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (1, "1 site that the other run has (act0 output[0]): if what goes wrong is it, it shows here"),
        (3, "3 sites that the other run has (act0 output[0], act1 output[0], act2 output[0]): if what goes"),
        (5, "5 sites that the other run has (act0 output[0], act1 output[0], act2 output[0] and 2 more): if what goes"),
    ],
)
def test_what_only_the_candidate_shows_just_before_it_is_counted(count: int, message: str, tmp_path: Path) -> None:
    def with_activations(step: int, sites: Step) -> None:
        at(HEAD, lambda x: x * np.float32(1.5))(step, sites)
        before(HEAD, *(("forward", "", f"act{number}", "output[0]") for number in range(count)))(step, sites)
        before(HEAD, ("backward", "", "act0", "output[0]"))(step, sites)  # of another phase
        before(("batch", "after", "rng", "cpu"), ("forward", "", "after", "output[0]"))(step, sites)

    modules = {**CONTENT["modules"], "after": "GELU", **{f"act{number}": "GELU" for number in range(count)}}
    candidate = record(tmp_path / "candidate", with_activations, content={**CONTENT, "modules": modules})

    first = compare(record(tmp_path / "baseline"), candidate).first_divergence

    assert first is not None
    assert first.evidence["one_hop_late"] == [f"act{number} output[0]" for number in range(count)]
    assert f"Just before it, the baseline did not observe {message}" in first.message


def test_what_is_unseen_before_the_last_site_that_agrees_is_not_named(tmp_path: Path) -> None:
    with_activation = before(("forward", "", "fc", "output[0]"), ("forward", "", "act", "output[0]"))
    content = {**CONTENT, "modules": {**CONTENT["modules"], "act": "GELU"}}
    wrong = record(tmp_path / "candidate", at(HEAD, lambda x: x * np.float32(1.5)))

    first = compare(record(tmp_path / "baseline", with_activation, content=content), wrong).first_divergence

    assert first is not None
    assert first.evidence["after"] == "fc output[0]"
    assert "one_hop_late" not in first.evidence


def test_before_the_very_first_site_there_is_nothing(tmp_path: Path) -> None:
    def forward_only(_step: int, sites: Step) -> None:
        for site in [site for site in sites if site[0] != "forward"]:
            del sites[site]

    def wrong(step: int, sites: Step) -> None:
        forward_only(step, sites)
        at(("forward", "", "fc", "output[0]"), lambda x: x * np.float32(1.5))(step, sites)

    first = compare(record(tmp_path / "b", forward_only), record(tmp_path / "c", wrong)).first_divergence

    assert first is not None
    assert first.evidence["after"] == ""


def seen(phase: str, path: str, values: Array, candidate: Array | None = None, *, order: int = 0) -> Pair:
    site = (phase, "", path, "output[0]")
    sides = (only([part(one, site=site, order=order)]) for one in (values, values if candidate is None else candidate))
    return Pair(baseline=next(sides), candidate=next(sides))


def finding(phase: str, kind: str = "value", *, order: int = 9) -> Finding:
    return Finding(step=0, phase=phase, path="head", slot="output[0]", order=order, kind=kind, message="")


@pytest.mark.parametrize(
    ("phase", "kind", "known"),
    [
        ("forward", "value", True),
        ("loss", "value", True),
        ("backward", "value", True),
        ("batch", "value", False),
        ("grad", "value", False),
        ("forward", "missing", False),
        ("forward", "extra", False),
    ],
)
def test_only_what_is_computed_in_the_order_of_execution_has_something_before_it(
    phase: str, kind: str, known: bool
) -> None:
    pairs = (seen("forward", "fc", random(2, 3, seed=0)), seen("forward", "rng", random(2, seed=0), order=1))

    remark, evidence = surroundings(
        finding(phase, kind), pairs, Aligned(pairs=pairs, only_baseline=(), only_candidate=(), unmerged=())
    )

    assert (remark, evidence) == ("", {"after": "fc output[0]"} if known else {})


def unreached(count: int, *, columns: int = 4) -> Array:
    """A gradient of logits of which so many rows are zero."""
    values = np.ones((8, columns), dtype=np.float32)
    values[:count] = 0.0
    return values


def test_another_number_of_positions_that_the_loss_reaches_is_said() -> None:
    pairs = [seen("backward", "head", unreached(1), unreached(3)), seen("backward", "fc", unreached(0), order=1)]

    assert unreached_positions_message(finding("loss"), pairs) == (
        " The loss gives no gradient to 1 of 8 positions in the baseline, and to 3 in the candidate: are labels "
        "shifted, padded or masked otherwise?"
    )


def test_single_gradients_that_are_rounded_to_zero_hide_no_positions_that_the_loss_does_not_reach() -> None:
    rounded = unreached(3, columns=60)
    rounded[7, 0] = 0.0

    said = unreached_positions_message(finding("loss"), [seen("backward", "head", unreached(0, columns=60), rounded)])

    assert " to 0 of 8 positions in the baseline, and to 3 in the candidate" in said


SPECKLED = np.ones((8, 4), dtype=np.float32)
SPECKLED[0, :3] = 0.0


@pytest.mark.parametrize(
    ("phase", "pairs"),
    [
        ("grad", [seen("backward", "head", unreached(1), unreached(3))]),
        ("loss", []),
        ("loss", [seen("forward", "head", unreached(1), unreached(3))]),
        ("loss", [seen("backward", "head", unreached(1)[0], unreached(3)[4])]),
        ("loss", [seen("backward", "head", unreached(1), unreached(3)[:7])]),
        ("loss", [seen("backward", "head", unreached(1, columns=1), unreached(3, columns=1))]),
        ("loss", [seen("backward", "head", unreached(2), unreached(2))]),
        ("loss", [seen("backward", "head", unreached(1), SPECKLED)]),
        ("loss", [seen("backward", "b", unreached(1), unreached(3), order=1), seen("backward", "a", unreached(1))]),
    ],
    ids=[
        "no loss", "nothing seen", "no gradient", "one axis", "another shape", "one column", "as many", "parts of rows",
        "not the first",
    ],
)  # fmt: skip
def test_nothing_is_said_of_positions_where_nothing_tells(phase: str, pairs: list[Pair]) -> None:
    assert unreached_positions_message(finding(phase), pairs) == ""
