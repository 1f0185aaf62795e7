"""What a reader does with a page: exact numbers, explanations, ranges, addresses, paper, and a run that goes on."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from tests.made_up import Seen, Step, at, both, record
from tests.present.browser.conftest import Open
from traindiff.analyse.check import check
from traindiff.analyse.compare import Comparison, compare
from traindiff.present.viewer import Viewer

FC = ("forward", "", "fc", "output[0]")


def with_losses(step: int, sites: Step) -> None:
    """A loss, and the scale that the training logs before it."""
    sites["loss", "", "grad_scale", "logged"] = Seen(values=np.array(1024.0))
    sites["loss", "", "loss", "logged"] = Seen(values=np.array(3.834076 - 0.01 * step))


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Ten steps that part in the fourth one, with losses that differ in their sixth digit."""
    folder = tmp_path_factory.mktemp("readers")
    other = both(
        with_losses,
        at(("loss", "", "loss", "logged"), lambda x: x + 3e-6),
        at(FC, lambda x: x * np.float32(1.5), step=3),
    )
    return compare(record(folder / "b", with_losses, steps=10), record(folder / "c", other, steps=10), history=True)


def chosen(tab: Any, site: str) -> None:
    tab.fill("#query", site)
    tab.click(f"#sites button.site:has-text('{site}')")


def test_numbers_of_single_elements_are_exact(opened: Open, parted: Comparison) -> None:
    one = opened(parted)
    chosen(one.tab, "grad_scale")

    assert re.search(r"\bgrad_scale logged\b.*\b1024\b.*\b1024\b", one.text("#sites").replace("\n", " "))
    assert "1,024" in one.text("#details")
    one.tab.fill("#query", "loss logged")
    cells = one.tab.locator("#sites tr:has(button:text-is('loss logged')) td.number").all_inner_texts()
    baseline, candidate = cells[1:3]
    assert baseline != candidate
    assert abs(float(candidate) - float(baseline) - 3e-6) < 1e-6


def test_losses_come_before_scales(opened: Open, parted: Comparison) -> None:
    titles = opened(parted).tab.locator("#curves h4").all_inner_texts()

    assert titles[0].startswith("loss (logged)")


def test_words_are_explained_for_the_mouse_and_the_keyboard(opened: Open, parted: Comparison) -> None:
    tab = opened(parted).tab
    assert tab.is_hidden("#term-tip")
    tab.hover("#verdict .word [data-term]")
    assert len(tab.inner_text("#term-tip")) > 40
    tab.mouse.move(2, 2)
    assert tab.is_hidden("#term-tip")

    tab.focus(".legend [data-term=follows]")
    said = tab.inner_text("#term-tip")
    assert len(said) > 40
    assert tab.get_attribute(".legend [data-term=follows]", "aria-describedby") == "term-tip"
    box = tab.locator("#term-tip").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 1400
    tab.keyboard.press("Escape")
    assert tab.is_hidden("#term-tip")


def test_every_marked_word_has_an_explanation(opened: Open, parted: Comparison) -> None:
    unexplained = (
        "() => { const known = JSON.parse(document.getElementById('data').textContent).terms; return "
        "[...document.querySelectorAll('[data-term]')].map(e => e.dataset.term).filter(term => !known[term]) }"
    )

    assert opened(parted).tab.evaluate(unexplained) == []


def test_a_cell_has_an_address_that_leads_to_it(opened: Open, parted: Comparison) -> None:
    tab = opened(parted).tab
    chosen(tab, "head output[0]")
    tab.focus("#map")
    tab.keyboard.press("Home")
    address = tab.url
    assert "#site=forward%3A+head+output%5B0%5D&step=0" in address
    assert tab.locator("#details a.link").evaluate("link => link.href") == address

    again = tab.context.new_page()
    again.goto(address.replace("step=0", "step=7"))
    again.wait_for_selector("body[data-ready]")
    assert again.inner_text("#details-title") == "head output[0]"
    assert "step 7" in again.inner_text("#status")
    again.evaluate("location.hash = '#site=forward%3A+fc+output%5B0%5D&step=3'")
    again.wait_for_function("document.getElementById('details-title').textContent === 'fc output[0]'")
    assert "step 3" in again.inner_text("#status")


def test_an_address_of_a_site_that_is_not_there_shows_the_page_as_ever(opened: Open, parted: Comparison) -> None:
    one = opened(parted)
    one.tab.goto(one.tab.url.partition("#")[0] + "?x=1#site=nothing&step=x")
    one.tab.wait_for_selector("body[data-ready]")

    assert one.text("#details-title") == "fc output[0]"
    assert not [line for line in one.said if line.startswith("error")]


def test_all_pictures_show_the_steps_that_are_asked_for(opened: Open, parted: Comparison) -> None:
    tab = opened(parted).tab
    assert tab.is_hidden("#all-steps")
    tab.fill("#from-step", "2")
    tab.fill("#to-step", "5")
    tab.press("#to-step", "Enter")
    tab.focus("#map")
    tab.keyboard.press("Home")
    assert "step 2" in tab.inner_text("#status")
    tab.keyboard.press("End")
    tab.keyboard.press("ArrowRight")
    assert "step 5" in tab.inner_text("#status")
    tab.click("#all-steps")
    assert (tab.input_value("#from-step"), tab.input_value("#to-step")) == ("0", "9")


def test_dragging_over_a_plot_zooms_all_pictures(opened: Open, parted: Comparison) -> None:
    tab = opened(parted).tab
    box = tab.locator("#curves .u-over").first.bounding_box()
    y = box["y"] + box["height"] / 2
    tab.mouse.move(box["x"] + 0.32 * box["width"], y)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 0.68 * box["width"], y, steps=5)
    tab.mouse.up()
    tab.wait_for_function("document.getElementById('from-step').value === '3'")

    assert tab.input_value("#to-step") == "6"
    tab.mouse.dblclick(box["x"] + 0.5 * box["width"], y)
    tab.wait_for_function("document.getElementById('to-step').value === '9'")


def test_a_check_says_which_rules_were_asked(opened: Open, tmp_path: Path) -> None:
    path = record(tmp_path / "run", with_losses, steps=4)
    verdict = check(path, history=True)
    one = opened(verdict)
    text = one.text("[aria-labelledby=rules-title]")

    assert f"Rules that were asked {len(verdict.rules)}" in text
    assert one.tab.locator(".rules tbody tr").count() == len(verdict.rules)
    assert one.tab.locator("#of-phases .plot canvas").count() >= 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1024, 1440])
def test_nothing_is_wider_than_the_window(opened: Open, parted: Comparison, width: int, scheme: str) -> None:
    one = opened(parted, width=width, scheme=scheme)
    one.screenshot(f"readers-{width}-{scheme}")

    assert one.tab.evaluate("document.documentElement.scrollWidth") == width


def test_paper_has_everything_and_no_controls(opened: Open, parted: Comparison, tmp_path: Path) -> None:
    tab = opened(parted, scheme="dark").tab
    tab.emulate_media(media="print")

    assert tab.is_hidden("#controls")
    assert tab.is_visible("#map")
    assert tab.evaluate("getComputedStyle(document.querySelector('.map')).maxHeight") == "none"
    assert len(tab.pdf(path=tmp_path / "page.pdf")) > 20_000


@pytest.fixture
def viewer(tmp_path: Path) -> Iterator[Viewer]:
    record(tmp_path / "runs" / "base", with_losses, steps=10)
    record(tmp_path / "runs" / "growing", with_losses, steps=5, close=False)
    viewer = Viewer(str(tmp_path / "runs"), port=0)
    thread = Thread(target=viewer.serve, daemon=True)
    thread.start()
    yield viewer
    viewer.close()


def test_a_page_of_a_run_that_goes_on_keeps_what_was_chosen(browser: Any, viewer: Viewer, tmp_path: Path) -> None:
    tab = browser.new_page()
    said: list[str] = []
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.goto(f"{viewer.address}run/growing")
    tab.wait_for_selector("body[data-ready]", timeout=60_000)
    tab.evaluate("window.same = true")
    tab.click(".chip:text-is('backward')")
    assert tab.get_attribute(".chip:text-is('backward')", "aria-pressed") == "false"
    tab.fill("#query", "head")
    tab.select_option("#quantity", "size")
    tab.click("#sites button.site >> nth=0")
    title = tab.inner_text("#details-title")

    shutil.rmtree(tmp_path / "runs" / "growing")
    record(tmp_path / "runs" / "growing", with_losses, steps=9, close=False)
    tab.locator(".facts li", has_text="9 steps checked").wait_for(timeout=150_000)
    tab.wait_for_selector("body[data-ready]")

    assert tab.evaluate("window.same")  # the same document, not one that was loaded again
    assert tab.inner_text("#details-title") == title
    assert (tab.input_value("#query"), tab.input_value("#quantity")) == ("head", "size")
    assert tab.get_attribute(".chip:text-is('backward')", "aria-pressed") == "false"
    assert tab.input_value("#to-step") == "8"
    assert said == []
    tab.close()
