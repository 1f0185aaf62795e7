"""Results outside a terminal: a short line, a piece of HTML without scripts, tables, pictures."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.hostile_names import NAMES
from tests.made_up import Edit, Seen, Step, at, random, record
from traindiff.analyse.check import check
from traindiff.analyse.compare import Comparison, compare
from traindiff.analyse.compare.verification import Verification
from traindiff.errors import ConfigError
from traindiff.storage import open_recording

FC = ("forward", "", "fc", "output[0]")


@pytest.fixture
def parted(tmp_path: Path) -> Comparison:
    other = record(tmp_path / "c", at(FC, lambda x: x * np.float32(1.5), step=1))
    return compare(record(tmp_path / "b"), other, history=True)


def test_the_repr_of_every_result_is_one_short_line(parted: Comparison, tmp_path: Path) -> None:
    verification = Verification(comparison=parted, sides=(None, None), output="x")  # type: ignore[arg-type]
    lines = [repr(one) for one in (parted, verification, check(tmp_path / "b"), open_recording(str(tmp_path / "b")))]

    assert lines[0] == "<Comparison diverged at step 1, micro-step 0, forward, fc output[0]; 3 steps, 18 sites>"
    assert lines[1] == lines[0].replace("Comparison", "Verification")
    assert lines[2].startswith("<Verdict ")
    assert lines[3] == f"<Recording {tmp_path / 'b'}: 1 rank of 1>"
    assert all(len(line) < 200 and "\n" not in line for line in lines)


def test_html_names_the_verdict_and_the_place_and_has_no_script(parted: Comparison, tmp_path: Path) -> None:
    for result, part in ((parted, "fc output[0]"), (check(tmp_path / "b"), "over 3 steps"),
                         (open_recording(str(tmp_path / "b")), "1 rank")):  # fmt: skip
        html = result._repr_html_()
        assert part in html
        assert not re.search(r"<script|https?://|on\\w+=", html)
        assert html.count("<table") == html.count("</table")
        assert len(html) < 20_000


@pytest.mark.parametrize("name", NAMES)
def test_names_that_are_markup_are_text(name: str, tmp_path: Path) -> None:
    path = f"<img src=x onerror=alert(1)>{name}"

    def with_name(factor: float) -> Edit:
        def edit(step: int, sites: Step) -> None:
            sites["forward", "", path, "output[0]"] = Seen(values=random(5, 8, seed=step) * np.float32(factor))

        return edit

    found = compare(record(tmp_path / "b", with_name(1.0)), record(tmp_path / "c", with_name(2.0)))
    html = found._repr_html_()

    assert found.first_divergence is not None
    assert "&lt;img src=x" in html
    assert "<img" not in html


def test_tables_have_the_rows_of_the_json(parted: Comparison, tmp_path: Path) -> None:
    sites = parted.to_arrow()
    run = open_recording(str(tmp_path / "b"))

    assert sites.num_rows == len(parted.differences)
    (row,) = (one for one in sites.to_pylist() if one["word"] == "above")
    assert (row["site"], row["slot"], row["step"], round(row["difference"], 6)) == ("fc", "output[0]", 1, 0.5)
    assert set(run.to_arrow().column_names) >= {"step", "site", "norm", "fingerprint"}
    assert check(tmp_path / "b").to_arrow().num_rows == len(check(tmp_path / "b").warnings)


@pytest.mark.parametrize("name", ["pandas", "polars"])
def test_a_data_frame_has_these_rows_too_or_the_library_is_named(
    name: str, parted: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    to = getattr(parted, f"to_{name}")
    try:
        __import__(name)
    except ModuleNotFoundError:
        pass
    else:
        assert len(to()) == len(parted.differences)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match=f"pip install {name}"):
        to()


def test_a_site_is_drawn_in_both_runs_with_its_floor(parted: Comparison, tmp_path: Path) -> None:
    figure = parted.plot("fc output[0]")

    sizes, differences = figure.axes
    assert [line.get_label() for line in sizes.lines] == [
        "baseline forward",
        "candidate forward",
        "baseline backward",
        "candidate backward",
    ]
    assert [line.get_label() for line in differences.lines][:2] == ["difference forward", "floor forward"]
    assert list(sizes.lines[0].get_xdata()) == [0, 1, 2]
    assert np.nanmax(differences.lines[0].get_ydata()) == pytest.approx(0.5)
    assert check(tmp_path / "b", history=True).plot("fc.weight grad").axes[0].lines
    assert open_recording(str(tmp_path / "b")).plot("fc.weight grad").axes[0].lines


def test_what_cannot_be_drawn_is_said(parted: Comparison, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'fc output\[0\]'"):
        parted.plot("fc outputt[0]")
    with pytest.raises(ConfigError, match=r"history=True"):
        compare(tmp_path / "b", tmp_path / "c").plot("fc")
    with pytest.raises(ConfigError, match=r"history=True"):
        compare(tmp_path / "b", tmp_path / "c").to_html()


def test_the_page_is_that_of_the_report(parted: Comparison, tmp_path: Path) -> None:
    assert parted.to_html().lstrip().startswith("<!doctype html>")
    assert "healthy" in open_recording(str(tmp_path / "b")).to_html()
