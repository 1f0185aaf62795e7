"""`traindiff view` in a browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.made_up import FC, record, scaled
from tests.present.browser.conftest import SCREENSHOTS, Open
from traindiff.present.viewer import Viewer


@pytest.fixture
def viewer(tmp_path: Path) -> Iterator[Viewer]:
    record(tmp_path / "root" / "baseline")
    record(tmp_path / "root" / "candidate", scaled(FC, 1e-2, step=1))
    record(tmp_path / "root" / "growing", steps=2, close=False)
    one = Viewer(tmp_path / "root")
    thread = Thread(target=one.serve)
    thread.start()
    yield one
    one.close()
    thread.join()


def test_two_recordings_of_the_list_are_compared(browser: Any, viewer: Viewer) -> None:
    tab = browser.new_page(viewport={"width": 1400, "height": 700})
    said: list[str] = []
    tab.on("console", lambda message: said.append(message.text))
    tab.goto(viewer.address)
    SCREENSHOTS.mkdir(exist_ok=True)
    tab.screenshot(path=SCREENSHOTS / "list.png")
    tab.click("a[aria-label='pin baseline as the baseline']")
    tab.screenshot(path=SCREENSHOTS / "pinned.png")
    tab.click("a[href='/compare?baseline=baseline&candidate=candidate']")
    tab.wait_for_selector("body[data-ready=yes]")

    assert tab.inner_text(".verdict .word") == "diverged"
    assert [text for text in said if "favicon" not in text and "404" not in text] == []
    tab.close()


def test_the_list_renews_itself_around_what_is_typed(browser: Any, viewer: Viewer) -> None:
    tab = browser.new_page(viewport={"width": 390, "height": 700})
    tab.goto(viewer.address)
    tab.evaluate("window.same = true")
    tab.fill("input[type=search]", "cand")
    tab.focus("a[aria-label='pin candidate as the baseline']")
    tab.locator("#runs a.word", has_text="healthy").nth(1).wait_for(timeout=60_000)

    assert tab.evaluate("window.same")
    assert tab.input_value("input[type=search]") == "cand"
    assert tab.evaluate("document.activeElement.getAttribute('aria-label')") == "pin candidate as the baseline"
    assert tab.evaluate("document.documentElement.scrollWidth") == 390
    box = tab.locator("#runs a.word", has_text="healthy").first.bounding_box()
    assert box["x"] + box["width"] <= 390  # the verdict is seen without scrolling
    tab.close()


def test_the_report_of_a_run_that_is_recording_brings_itself_up_to_date(
    opened: Open, viewer: Viewer, tmp_path: Path
) -> None:
    page = opened(f"{viewer.address}run/growing")
    assert page.text(".facts b >> nth=0") == "2"
    longer = record(tmp_path / "longer", steps=6, close=False)
    shutil.copytree(longer, tmp_path / "root" / "growing", dirs_exist_ok=True)

    page.tab.locator(".facts b", has_text="6").first.wait_for(timeout=20_000)
    assert {address.partition("?")[0] for address in page.asked} <= {
        f"{viewer.address}run/growing", f"{viewer.address}state", f"{viewer.address}favicon.ico",
    }  # fmt: skip
