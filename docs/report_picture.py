"""Take the pictures of docs/report.md, in Chromium: the report of the demo's faulty run, as a browser shows it.

Run it after `traindiff demo --steps 30`: python docs/report_picture.py traindiff-demo docs
"""

import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from traindiff.analyse.compare import compare
from traindiff.present.page import page_of, write

if __name__ == "__main__":
    recordings, docs = Path(sys.argv[1]), Path(sys.argv[2])
    result = compare(recordings / "baseline", recordings / "faulty-lost-gradient", history=True)
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        page = Path(directory) / "report.html"
        with page.open("w", encoding="utf-8") as file:
            write(page_of(result), file)
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        for scheme, name, height in (("light", "report", 860), ("dark", "report-heat-map", 900)):
            tab = browser.new_page(viewport={"width": 1280, "height": height}, color_scheme=scheme)
            tab.goto(page.as_uri())
            tab.wait_for_selector("body[data-ready=yes]")
            tab.evaluate("name => name && document.getElementById(name).parentElement.scrollIntoView()",
                         "map-title" if "map" in name else "")  # fmt: skip
            tab.wait_for_timeout(300)
            tab.screenshot(path=docs / f"{name}.png")
        browser.close()
