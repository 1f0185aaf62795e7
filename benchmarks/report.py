"""How long a report of 1,000 sites and 1,000 steps takes to keep, to write and to open: `python benchmarks/report.py`.

Opening needs playwright and Chromium (`make test-browser` installs the former).
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from traindiff.analyse.compare import Comparison
from traindiff.analyse.merge.distance import Pair
from traindiff.analyse.merge.history import DifferenceHistory
from traindiff.analyse.merge.site import MergedSite, SiteKey
from traindiff.core.summary import empty
from traindiff.present.page import page_of, write

SITES = 1_000
STEPS = 1_000
PHASES = (("forward", "output[0]"), ("backward", "output[0]"), ("grad", "grad"), ("update", "update"))


def entry(key: SiteKey, order: int, random: np.random.Generator) -> MergedSite:
    """A site whose summary is drawn at random."""
    summary = empty()
    summary["count"], summary["sum_of_squares"] = 4096, random.random() * 100
    summary["sketch"] = random.standard_normal(64)
    for name in ("row_squares", "row_largest", "column_squares", "column_largest"):
        summary[name] = random.random(16)
    summary["minimum"], summary["maximum"], summary["smallest"] = -1, 1, 1e-9
    return MergedSite(key=key, order=order, dtype="float32", shape=(64, 64), summary=summary[()])


def history() -> DifferenceHistory:
    """Differences that no compression can foresee."""
    random = np.random.default_rng(0)
    keys = [
        SiteKey(phase, "", f"h.{site}", slot, 0, 0) for phase, slot in PHASES for site in range(SITES // len(PHASES))
    ]
    pairs = [
        Pair(baseline=entry(key, order, random), candidate=entry(key, order, random)) for order, key in enumerate(keys)
    ]
    found = DifferenceHistory()
    for step in range(STEPS):
        sizes = 10 ** random.uniform(-8, -4, SITES)
        floors = 10 ** random.uniform(-6.2, -5.8, SITES)
        for pair, size, floor in zip(pairs, sizes.tolist(), floors.tolist(), strict=True):
            found.note(pair, step, size, floor)
    return found


def seconds_to_open(page: Path) -> list[float]:
    """Seconds until the page is drawn, five times in a fresh tab."""
    from playwright.sync_api import sync_playwright

    taken = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for _ in range(5):
            tab = browser.new_page(viewport={"width": 1400, "height": 1000})
            start = time.perf_counter()
            tab.goto(page.as_uri())
            tab.wait_for_selector("body[data-ready=yes]")
            taken.append(time.perf_counter() - start)
            tab.close()
        browser.close()
    return taken


def main() -> None:
    """Print the figures."""
    start = time.perf_counter()
    kept = history()
    print(f"keeping: {(time.perf_counter() - start) / SITES / STEPS * 1e6:.1f} us for each site in each step")
    result = Comparison(
        baseline="baseline", candidate="candidate", verdict="equivalent", calibrated=False, findings=(),
        unaligned=((), ()), steps=tuple(range(STEPS)), notes=(), differences=(), history=kept,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        page = Path(directory) / "report.html"
        start = time.perf_counter()
        with page.open("w", encoding="utf-8") as file:
            write(page_of(result), file)
        print(f"writing: {time.perf_counter() - start:.2f} s, {page.stat().st_size / 1e6:.1f} MB")
        taken = seconds_to_open(page)
        print(f"opening: {statistics.median(taken):.2f} s ({min(taken):.2f} to {max(taken):.2f})")


if __name__ == "__main__":
    main()
