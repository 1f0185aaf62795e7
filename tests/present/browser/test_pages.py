"""Reports as people see and use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.made_up import BATCH, FC, HEAD, Seen, Step, at, both, record, scaled
from tests.present.browser.conftest import SCREENSHOTS, Open, Opened
from tests.present.hostile import CLOSING, NAME, hostile_pair
from traindiff.analyse.check import Verdict, check
from traindiff.analyse.compare import Comparison, compare

GRADIENT = ("grad", "", "fc.weight", "grad")
STEPS = 12


def loss(step: int, sites: Step) -> None:
    sites["loss", "", "loss", "backward"] = Seen(values=np.array(3.0 / (1 + step), np.float32))


def drift(step: int, sites: Step) -> None:
    """Differences that grow from step 4 on."""
    loss(step, sites)
    for site in (FC, HEAD, GRADIENT):
        scaled(site, 1e-7 if step < 4 else 1e-6 * 2.0**step)(step, sites)
    if step > 4:
        at(("loss", "", "loss", "backward"), lambda value: value * np.float32(1.01))(step, sites)


@pytest.fixture
def parted(tmp_path: Path) -> Comparison:
    """Two runs that part, on two ranks; one of them gets a gradient wrong."""
    for rank in range(2):
        about: dict[str, Any] = {"rank": rank, "steps": STEPS, "run": {"world_size": 2}}
        record(tmp_path / "baseline", loss, **about)
        wrong = at(GRADIENT, lambda values: values * 2, step=4)
        record(tmp_path / "candidate", both(drift, wrong) if rank else drift, **about)
    return compare(tmp_path / "baseline", tmp_path / "candidate", history=True)


def broken(step: int, sites: Step) -> None:
    loss(step, sites)
    if step > 6:
        at(FC, lambda values: values * np.float32(np.inf))(step, sites)
    sites["param", "", "fc.weight", "value"] = Seen(values=np.ones((8, 6), np.float32))


@pytest.fixture
def unhealthy(tmp_path: Path) -> Verdict:
    return check(record(tmp_path / "run", broken, steps=STEPS), history=True)


def sites_of(page: Opened) -> list[tuple[str, str]]:
    """Phase and site of the rows of the table, in the order of the heat map."""
    return [
        (row.query_selector("td:nth-child(1)").inner_text(), row.query_selector("td:nth-child(2)").inner_text())
        for row in page.tab.query_selector_all("#sites tbody tr")
    ]


def click_cell(page: Opened, row: int, column: int, *, num_columns: int = STEPS) -> None:
    """Click the middle of a cell of the heat map."""
    heat_map = page.tab.locator("#map")
    heat_map.scroll_into_view_if_needed()
    box = heat_map.bounding_box()
    gutter, top, height = (float(heat_map.get_attribute(f"data-{name}")) for name in ("gutter", "top", "row-height"))
    across = (box["width"] - gutter) / num_columns
    heat_map.click(position={"x": gutter + (column + 0.5) * across, "y": top + (row + 0.5) * height})


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_comparison_opens_without_a_word_on_the_console_and_without_a_request(
    opened: Open, parted: Comparison, scheme: str
) -> None:
    page = opened(parted, scheme=scheme)

    page.screenshot(f"comparison-{scheme}")
    assert page.said == []
    assert page.asked == [page.tab.url.partition("#")[0]]  # a cell that is chosen is in the address
    assert page.text(".verdict .word") == "diverged"
    background = page.tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(246, 247, 249)", "dark": "rgb(14, 18, 24)"}[scheme]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_check_opens_without_a_word_on_the_console_and_without_a_request(
    opened: Open, unhealthy: Verdict, scheme: str
) -> None:
    page = opened(unhealthy, scheme=scheme)

    page.screenshot(f"check-{scheme}")
    assert page.said == []
    assert page.asked == [page.tab.url.partition("#")[0]]  # a cell that is chosen is in the address
    assert page.text(".verdict .word") == unhealthy.verdict
    assert page.tab.locator("#curves canvas").count() == 2


def test_clicking_a_cell_shows_its_site_and_its_step(opened: Open, parted: Comparison) -> None:
    page = opened(parted)
    sites = sites_of(page)

    for row, column in ((0, 0), (len(sites) - 1, STEPS - 1), (len(sites) // 2, 5)):
        click_cell(page, row, column)
        phase, site = sites[row]
        assert page.text("#details-title") == site
        assert page.text("#details .where").startswith(phase)
        assert page.text("#details .now").startswith(f"{phase}, step {column}")
        assert page.text("#status").startswith(f"{site}, {phase}, step {column}")
        assert page.tab.locator('#sites tr[aria-selected="true"]').count() == 1
    assert page.said == []


def test_numbers_of_the_cell_that_is_shown_are_those_of_the_comparison(opened: Open, parted: Comparison) -> None:
    page = opened(parted)
    row = sites_of(page).index(("grad", "fc.weight grad"))
    click_cell(page, row, 4)

    assert parted.history is not None
    history = parted.history.whole
    line = next(at for key, at in history.sites.items() if (key.phase, key.path) == ("grad", "fc.weight"))
    shown = page.text("#details .now").partition("difference ")[2].split()[0]
    assert float(shown) == pytest.approx(float(history.of("difference")[line, 4]), rel=2e-3)
    assert "fc.weight" in page.text("#details .found") or page.tab.locator("#details .found").count() == 1


def test_the_first_divergence_is_selected_and_leads_to_its_site(opened: Open, parted: Comparison) -> None:
    page = opened(parted)
    first = parted.first_divergence
    assert first is not None

    assert page.text("#details-title") == first.site
    click_cell(page, 0, 0)
    assert page.text("#details-title") != first.site
    page.tab.click(".headline button.site")
    assert page.text("#details-title") == first.site
    assert f"step {first.step}" in page.text("#details .now")


def test_the_picture_of_the_dataflow_leads_to_its_sites(opened: Open, parted: Comparison) -> None:
    page = opened(parted)
    nodes = page.tab.locator(".flow .node")

    assert nodes.count() >= 2
    name = nodes.nth(0).locator(".path").inner_text()
    nodes.nth(0).click()
    assert page.text("#details-title") == name


def test_the_heat_map_is_used_with_the_keyboard(opened: Open, parted: Comparison) -> None:
    page = opened(parted)
    sites = sites_of(page)
    click_cell(page, 3, 3)

    page.tab.focus("#map")
    page.tab.keyboard.press("ArrowDown")
    page.tab.keyboard.press("ArrowRight")
    assert page.text("#status").startswith(f"{sites[4][1]}, {sites[4][0]}, step 4")
    page.tab.keyboard.press("End")
    assert f"step {STEPS - 1}" in page.text("#status")
    page.tab.keyboard.press("Home")
    page.tab.keyboard.press("PageUp")
    assert page.text("#status").startswith(f"{sites[0][1]}, {sites[0][0]}, step 0")


def test_every_control_is_reached_with_the_tab_key(opened: Open, parted: Comparison) -> None:
    page = opened(parted)
    reached = set()
    for _ in range(60):
        page.tab.keyboard.press("Tab")
        reached.add(page.tab.evaluate("document.activeElement.id || document.activeElement.className"))

    assert {"theme", "site", "chip", "quantity", "rank", "query", "differing", "map"} <= reached


def test_a_search_narrows_the_table_and_the_heat_map(opened: Open, parted: Comparison) -> None:
    page = opened(parted)
    page.tab.fill("#query", "grad fc.")

    assert {site for _, site in sites_of(page)} == {"fc.weight grad", "fc.bias grad"}
    assert page.tab.get_attribute("#map", "data-rows") == "2"
    click_cell(page, 1, 2)
    assert page.text("#details-title") == sites_of(page)[1][1]
    page.tab.fill("#query", "no such site")
    assert sites_of(page) == []
    page.tab.keyboard.press("Escape")
    page.tab.click(".headline button.site")
    assert len(sites_of(page)) > 2
    assert page.said == []


def test_phases_are_switched_off_and_on(opened: Open, parted: Comparison) -> None:
    page = opened(parted)
    before = sites_of(page)
    page.tab.click("button.chip >> text=optimizer")
    without = sites_of(page)
    page.tab.click("button.chip >> text=optimizer")

    assert without == [one for one in before if one[0] != "optimizer"]
    assert sites_of(page) == before


def test_one_rank_is_shown_alone(opened: Open, parted: Comparison) -> None:
    page = opened(parted)
    page.tab.select_option("#rank", "1")
    page.screenshot("rank-1")

    assert ("grad", "fc.weight grad") in sites_of(page)
    assert page.tab.is_disabled("#quantity")
    page.tab.select_option("#rank", "all")
    assert not page.tab.is_disabled("#quantity")
    assert page.said == []


def test_the_table_is_sorted_by_what_is_clicked(opened: Open, parted: Comparison) -> None:
    page = opened(parted)
    page.tab.click("#sites th button >> text=x floor")
    cells = page.tab.locator("#sites tbody td:nth-last-child(2)").all_inner_texts()
    ratios = [float(cell) for cell in cells if cell not in ("–", "inf")]

    assert ratios == sorted(ratios, reverse=True)
    assert page.tab.get_attribute("#sites th:nth-last-child(2)", "aria-sort") == "descending"
    page.tab.click("#sites th button >> text=x floor")
    assert page.tab.get_attribute("#sites th:nth-last-child(2)", "aria-sort") == "ascending"


def test_the_table_shows_both_runs_side_by_side_in_the_selected_step(opened: Open, parted: Comparison) -> None:
    page = opened(parted)
    page.tab.check("#one-step")
    click_cell(page, 0, 7)

    names = page.tab.locator("#sites thead th").all_inner_texts()
    for row in page.tab.query_selector_all("#sites tbody tr"):
        cells = dict(zip(names, [cell.inner_text() for cell in row.query_selector_all("td")], strict=True))
        assert cells["at step"] == "7"
        assert float(cells["baseline"]) > 0
        assert float(cells["candidate"]) == pytest.approx(float(cells["baseline"]), rel=2.1)
    click_cell(page, 0, 4)
    assert set(page.tab.locator("#sites tbody td:nth-child(4)").all_inner_texts()) == {"4"}
    page.tab.screenshot(path=SCREENSHOTS / "sites-of-a-step.png", full_page=True)
    assert page.said == []


def test_the_first_divergence_is_marked_in_the_table(opened: Open, parted: Comparison) -> None:
    page = opened(parted)
    page.tab.check("#one-step")

    first = parted.first_divergence
    assert first is not None
    assert page.tab.locator("#sites td.first").all_inner_texts() == [f"{first.path} {first.slot}"]


def test_only_what_is_above_its_floor_is_shown_when_asked(opened: Open, parted: Comparison) -> None:
    page = opened(parted)
    page.tab.check("#differing")

    shown = {site for _, site in sites_of(page)}
    assert shown
    assert "fc.bias grad" not in shown
    assert "fc output[0]" in shown


def test_dark_and_light_are_switched(opened: Open, parted: Comparison) -> None:
    page = opened(parted)
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.tab.evaluate(background)
    page.tab.click("#theme")
    dark = page.tab.evaluate(background)
    page.tab.click("#theme")

    assert dark != light == page.tab.evaluate(background)
    assert page.said == []


def test_each_quantity_of_a_check_is_drawn(opened: Open, unhealthy: Verdict) -> None:
    page = opened(unhealthy)
    for name in ("size", "largest", "zero", "nonfinite", "relative"):
        page.tab.select_option("#quantity", name)

    assert page.said == []


@pytest.mark.parametrize("kind", ["comparison", "check"])
def test_names_that_are_markup_run_nothing(opened: Open, tmp_path: Path, kind: str) -> None:
    baseline, candidate = hostile_pair(tmp_path)
    result = compare(baseline, candidate, history=True) if kind == "comparison" else check(candidate, history=True)
    page = opened(result)
    page.screenshot(f"hostile-{kind}")
    sites = [site for _, site in sites_of(page)]
    for name in (NAME, CLOSING):
        row = sites.index(f"{name} output[0]")
        click_cell(page, row, 1, num_columns=3)
        assert page.text("#details-title") == f"{name} output[0]"
        page.tab.hover("#map", position={"x": 400, "y": 30})

    assert page.said == []
    assert page.asked == [page.tab.url.partition("#")[0]]  # a cell that is chosen is in the address


def test_what_follows_from_another_batch_is_not_shown_as_equal(opened: Open, tmp_path: Path) -> None:
    wrong = both(at(BATCH, lambda values: values + 1), scaled(FC, 0.5))
    page = opened(compare(record(tmp_path / "b"), record(tmp_path / "c", wrong), history=True))
    page.screenshot("misaligned")
    sites = sites_of(page)

    for site, message in (
        ("(root) input[0]", "differs, without a size, and must not differ"),
        ("fc output[0]", "it follows from the first divergence"),
    ):
        click_cell(page, [name for _, name in sites].index(site), 1, num_columns=3)
        assert message in page.text("#details .now")
        assert "the same bits" not in page.text("#details")
    assert page.tab.locator("#sites tr:nth-child(2) td:last-child").inner_text() == "follows"
    assert page.said == []


def test_a_narrow_window_shows_everything_below_each_other(opened: Open, parted: Comparison) -> None:
    page = opened(parted, width=480)
    page.screenshot("narrow")

    assert page.said == []
    assert page.tab.evaluate("document.documentElement.scrollWidth") <= 480
