"""Reports in a real browser: Chromium without a window, which must be installed, with playwright to drive it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from traindiff.analyse.check import Verdict
from traindiff.analyse.compare import Comparison
from traindiff.present.page import page_of, write

SCREENSHOTS = Path(os.environ.get("TRAINDIFF_SCREENSHOTS", Path(__file__).parents[3] / ".screenshots"))
"""Where pictures of the pages are left, to be looked at."""

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A browser; tests are skipped, with the reason, where there is none."""
    driver = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (make test-browser)")
    with driver.sync_playwright() as playwright:
        found = os.environ.get("TRAINDIFF_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
        if found is None and not Path(playwright.chromium.executable_path).exists():
            pytest.skip("Chromium is not installed, e.g. by apt-get install chromium")
        # Within a container, where tests often run as root, Chromium's own sandbox cannot be set up.
        launched = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield launched
        launched.close()


@dataclass(slots=True, kw_only=True)
class Opened:
    """A page in a browser tab.

    Attributes:
        tab: Playwright's page.
        said: What it wrote to the console, errors included, and dialogs that it opened.
        asked: Addresses of all requests.
    """

    tab: Any
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def text(self, selector: str) -> str:
        return str(self.tab.inner_text(selector))

    def screenshot(self, name: str) -> None:
        SCREENSHOTS.mkdir(exist_ok=True)
        self.tab.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)


Open = Callable[..., Opened]


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Write the page of a result, and open it; or open an address."""
    contexts = []

    def run(result: Comparison | Verdict | str, *, scheme: str = "light", width: int = 1400) -> Opened:
        address = result if isinstance(result, str) else (tmp_path / "report.html").as_uri()
        if not isinstance(result, str):
            with (tmp_path / "report.html").open("w", encoding="utf-8") as file:
                write(page_of(result), file)
        context = browser.new_context(viewport={"width": width, "height": 1000}, color_scheme=scheme)
        contexts.append(context)
        one = Opened(tab=context.new_page())
        one.tab.on("console", lambda message: one.said.append(f"{message.type}: {message.text}"))
        one.tab.on("pageerror", lambda error: one.said.append(f"error: {error}"))
        one.tab.on("dialog", lambda dialog: (one.said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        one.tab.on("request", lambda request: one.asked.append(request.url))
        one.tab.goto(address)
        one.tab.wait_for_selector("body[data-ready=yes]")
        return one

    yield run
    for context in contexts:
        context.close()
