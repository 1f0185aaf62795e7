"""A comparison in the terminal."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from rich.console import Console

from tests.made_up import Seen, Step, at, record
from traindiff.analyse.compare import Comparison, compare
from traindiff.present.text.results import print_report

FC = ("forward", "", "fc", "output[0]")


def printed(comparison: Comparison, *, top: int = 12, width: int = 100) -> list[str]:
    text = io.StringIO()
    print_report(Console(file=text, width=width, highlight=False), comparison, top=top)
    return [line.rstrip() for line in text.getvalue().splitlines()]


def test_equal_runs_are_one_line(tmp_path: Path) -> None:
    assert printed(compare(record(tmp_path / "b"), record(tmp_path / "c"))) == [
        "identical: every recorded tensor has the same bits, over 3 steps (0 to 2)"
    ]


def test_further_findings_are_listed(tmp_path: Path) -> None:
    def wrong(step: int, sites: Step) -> None:
        at(FC, lambda x: x * 2, step=1)(step, sites)
        at(("forward", "", "head", "output[0]"), lambda x: x * np.float32(np.nan), step=1)(step, sites)
        at(("grad", "", "fc.bias", "grad"), lambda x: x * np.float32(np.nan), step=2)(step, sites)

    lines = printed(compare(record(tmp_path / "b"), record(tmp_path / "c", wrong)))

    assert lines[:12] == [
        "diverged (uncalibrated): the numbers part, over 3 steps (0 to 2)",
        "",
        "First divergence: step 1, micro-step 0, forward, fc output[0]",
        "  The candidate's is 2 x the baseline's.",
        "  relative L2 difference 1 = 2.21e+05 x its floor of 4.53e-06",
        "  Everything before it agrees, up to (root) input[0].",
        "  First difference in bits: the same place.",
        "  more: traindiff explain scale",
        "",
        "Further findings: 2",
        "step  phase    site            what",
        "1     forward  head output[0]  The candidate holds 20 NaN where the baseline has 0, of 20 elements.",
    ]
    (second,) = (number for number, line in enumerate(lines) if line.startswith("2     grad     fc.bias grad"))
    assert lines[second + 1 :].index("  more: traindiff explain non-finite") < 3


def test_as_many_rows_as_wanted_are_shown(tmp_path: Path) -> None:
    def wrong(step: int, sites: Step) -> None:
        at(FC, lambda x: -x, step=0)(step, sites)
        for site, seen in sites.items():
            if (site[0], step) == ("grad", 1):
                seen.values = seen.values * np.float32(np.nan)
        at(("forward", "", "head", "output[0]"), lambda x: -x, step=2)(step, sites)

    comparison = compare(record(tmp_path / "b"), record(tmp_path / "c", wrong))

    assert "Further findings: 2, at 4 sites, the first 1" in printed(comparison, top=1)
    assert any(line.startswith("1     grad     fc.weight grad and 2 more") for line in printed(comparison, top=2))


def test_what_holds_for_many_parameters_is_said_once(tmp_path: Path) -> None:
    def forgotten(step: int, sites: Step) -> None:
        for site, seen in list(sites.items()):
            if site[3] == "momentum_buffer":
                sites["optimizer", "", site[2], "step"] = Seen(values=np.float32(step + 1))
                if step == 2:
                    seen.values = seen.values * np.float32(0.3)

    def forgetting(step: int, sites: Step) -> None:
        forgotten(step, sites)
        for site, seen in sites.items():
            if step == 2 and site[3] == "step":
                seen.values = np.float32(1.0)

    comparison = compare(record(tmp_path / "b", forgotten), record(tmp_path / "c", forgetting))

    assert len(comparison.findings) == 3
    assert "  The same holds for 2 more parameters: fc.bias, head.weight." in printed(comparison)
    assert "  The same holds for 2 more parameters: fc.bias, head.weight." in str(comparison).splitlines()
    assert not any(line.startswith("Further findings") for line in printed(comparison))


def test_what_limits_the_verdict_comes_last(tmp_path: Path) -> None:
    lines = printed(compare(record(tmp_path / "b"), record(tmp_path / "c", steps=2)))

    assert lines[0].startswith("incomplete")
    assert lines[-1].startswith("The candidate ends after step 1")


def test_differences_below_their_floors_are_listed_too(tmp_path: Path) -> None:
    lines = printed(compare(record(tmp_path / "b"), record(tmp_path / "c", at(FC, lambda x: x * np.float32(1 + 3e-7)))))

    assert lines[0].startswith("equivalent (uncalibrated)")
    assert lines[2].startswith(
        "First difference in bits: step 0, micro-step 0, forward, fc output[0]. The bits differ by "
    )
    assert lines[3] == "18 sites: 17 identical, 1 within their floors."
    assert lines[5] == "Largest differences, in execution order"
    assert lines[7].startswith("forward  fc output[0]")
    assert lines[7].endswith("within")
