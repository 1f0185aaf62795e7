"""What stands on the canvases of a report: numbers of axes, names beside rows, and how wide they are."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.made_up import FC, Edit, Seen, Step, both, random, record, scaled
from tests.present.browser.conftest import Open, Opened
from traindiff.analyse.check import check
from traindiff.analyse.compare import Comparison, compare

LINE_OF_TEXT = 12
"""Pixels."""

RECORDER = """() => {
  const context = CanvasRenderingContext2D.prototype;
  window.drawn = [];
  for (const name of ["fillText", "fillRect"]) {
    const plain = context[name];
    context[name] = function (...args) {
      const [text, at] = name === "fillText" ? [args[0], args.slice(1)] : ["", args];
      const place = this.getTransform(), box = this.canvas.closest(".plot");
      window.drawn.push({
        on: this.canvas.id || (box ? box.querySelector("h4").firstChild.textContent : ""),
        text, bold: this.font.includes("bold"), x: at[0] + place.e, y: at[1] + place.f,
        width: text ? this.measureText(text).width : at[2], height: text ? 0 : at[3],
      });
      return plain.apply(this, args);
    };
  }
  document.getElementById("theme").click();
}"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A text or a rectangle on a canvas.

    Attributes:
        on: The canvas: its id, or the title of the plot.
        text: Empty for a rectangle.
        bold: Whether the text is.
        x: Where it begins.
        y: The middle of a text, the upper edge of a rectangle.
        width: In pixels.
        height: Of a rectangle.
    """

    on: str
    text: str
    bold: bool
    x: float
    y: float
    width: float
    height: float


def drawn(page: Opened) -> list[Drawn]:
    """What is drawn when the page is drawn again, in its other colors."""
    page.tab.evaluate(RECORDER)
    page.tab.wait_for_timeout(300)
    return [Drawn(**one) for one in page.tab.evaluate("window.drawn")]


def losses(**values: float) -> Edit:
    def edit(step: int, sites: Step) -> None:
        for name, value in values.items():
            odd = 1 + 1e-7 * (step % 2) if name.startswith("near") else 1
            sites["loss", "", name, "logged"] = Seen(values=np.array(value * odd))

    return edit


CURVES = {"near one": 1.0, "near many": 86543.2, "zero": 0.0, "negative": -1 / 3, "tiny": 2.5e-12}


@pytest.fixture
def flat(tmp_path: Path) -> Comparison:
    """Two runs whose losses are constant, but for a rounding."""
    other = {name: value * (1 + 1e-7) for name, value in CURVES.items()}
    first = record(tmp_path / "baseline", losses(**CURVES), steps=12)
    return compare(first, record(tmp_path / "candidate", losses(**other), steps=12), history=True)


def axis_numbers(page: Opened) -> dict[str, list[str]]:
    """By curve of values, the numbers beside its vertical axis."""
    if page.tab.locator("#more-curves").count():
        page.tab.click("#more-curves summary")
        page.tab.wait_for_selector("#more-curves .plot canvas")  # drawn when it was opened
    found: dict[str, dict[str, None]] = {}
    heads = page.tab.locator(".curves .plot h4").all_inner_texts()
    plots = {head.rpartition(" (logged)")[0] for head in heads if not head.startswith("difference")}
    everything = drawn(page)
    for name in filter(None, plots):
        own = [one for one in everything if one.on.startswith(f"{name} (logged)") and one.text]
        lowest = max(one.y for one in own)
        found[name] = {one.text: None for one in own if one.y < lowest - 5}
    return {name: list(texts) for name, texts in found.items()}


@pytest.mark.parametrize("kind", ["comparison", "check"])
def test_curves_of_all_but_equal_values_have_an_axis_that_does_not_zoom_into_their_rounding(
    opened: Open, flat: Comparison, tmp_path: Path, kind: str
) -> None:
    page = opened(flat if kind == "comparison" else check(tmp_path / "baseline", history=True))
    page.screenshot(f"flat-{kind}")
    axes = axis_numbers(page)

    assert set(axes) == set(CURVES)
    for name, value in CURVES.items():
        numbers = [float(text) for text in axes[name]]
        assert len(set(numbers)) == len(numbers) >= 2
        assert max(numbers) - min(numbers) >= 0.4e-3 * abs(value)
        assert min(numbers) - 1e-6 * abs(value) <= value <= max(numbers) + 1e-6 * abs(value)
    assert page.said == []


def test_the_sizes_of_a_site_do_not_zoom_into_the_rounding_of_their_codes(opened: Open, flat: Comparison) -> None:
    page = opened(flat)
    page.tab.click("#sites button.site >> text=near many")
    texts = [one for one in drawn(page) if one.on.startswith("Size") and one.text]
    numbers = [float(one.text) for one in texts if one.y < max(other.y for other in texts) - 5]

    assert max(numbers) - min(numbers) >= 5e-3 * CURVES["near many"]
    assert page.said == []


def few(_step: int, sites: Step) -> None:
    sites["loss", "", "loss", "backward"] = Seen(values=np.array(2.0, np.float32))


def many(step: int, sites: Step) -> None:
    """So many sites that a row is lower than text, in phases of one row, and of nearly a hundred."""
    few(step, sites)
    for number in range(95):
        sites["forward", "", f"transformer.h.{number}.mlp.act", "output[0]"] = Seen(values=random(4, seed=number))


@pytest.mark.parametrize("edit", [few, many])
def test_each_phase_is_named_beside_its_own_rows_and_no_line_runs_through_text(
    opened: Open, tmp_path: Path, edit: Edit
) -> None:
    baseline = record(tmp_path / "baseline", edit)
    page = opened(compare(baseline, record(tmp_path / "candidate", both(edit, scaled(FC, 0.5))), history=True))
    page.screenshot(f"phases-{edit.__name__}")
    phases = page.tab.evaluate("JSON.parse(document.getElementById('data').textContent).rows.phase")
    height, top, gutter = (
        float(page.tab.get_attribute("#map", f"data-{name}")) for name in ("row-height", "top", "gutter")
    )
    onto = [one for one in drawn(page) if one.on == "map"]
    labels = {(one.text, one.y) for one in onto if one.bold}
    texts = [one for one in onto if one.text]

    assert {text for text, _ in labels} >= {"batch", "forward", "loss"}
    for phase, y in labels:
        assert phases[int((y - top) // height)] == phase
    for line in (one for one in onto if not one.text and one.height <= 1):
        for text in texts:
            crosses = line.x < text.x + text.width and text.x < line.x + line.width
            assert not (crosses and abs(line.y + line.height / 2 - text.y) < LINE_OF_TEXT / 2)
    assert all(text.x + text.width <= gutter for text in texts)
    for x in {text.x for text in texts}:
        places = sorted({text.y for text in texts if text.x == x})
        assert all(low + LINE_OF_TEXT <= high + 1e-6 for low, high in pairwise(places))


OVERFLOW = """() => [...document.querySelectorAll('.plot')].filter((plot) => plot.querySelector('.u-wrap'))
  .map((plot) => plot.querySelector('.u-wrap').getBoundingClientRect().width - plot.clientWidth)"""


@pytest.mark.parametrize("start", [1300, 420, 320])
def test_curves_are_as_wide_as_their_place_also_after_the_window_became_narrow(
    opened: Open, flat: Comparison, start: int
) -> None:
    page = opened(flat, width=start)
    page.tab.click("#more-curves summary")
    page.tab.set_viewport_size({"width": min(start, 420), "height": 1000})
    page.tab.wait_for_timeout(300)
    page.screenshot(f"narrow-from-{start}")

    widths = page.tab.evaluate(OVERFLOW)
    assert len(widths) >= 6
    assert max(map(abs, widths)) <= 1
    assert page.tab.evaluate("document.documentElement.scrollWidth") <= min(start, 420)
    assert page.said == []


def test_curves_are_drawn_again_when_their_place_alone_becomes_narrow(opened: Open, flat: Comparison) -> None:
    page = opened(flat)
    page.tab.evaluate("document.querySelector('main').style.width = '500px'")
    page.tab.wait_for_timeout(300)

    assert max(map(abs, page.tab.evaluate(OVERFLOW))) <= 1
    box = page.tab.locator("#map").bounding_box()
    ratio = page.tab.evaluate("document.getElementById('map').width / devicePixelRatio")
    assert ratio == pytest.approx(box["width"], abs=1)
