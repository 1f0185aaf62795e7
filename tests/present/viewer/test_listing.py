"""The list of `traindiff view`: what it says of each recording, and what it reads for that."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest

from tests.analyse.compact.made_up_ranks import record_ranks
from tests.made_up import CONTENT, Edit, Seen, Step, both, observed, record, scaled
from traindiff.analyse.compact import compact
from traindiff.present.viewer import catalog as catalogs
from traindiff.present.viewer import looking, looks
from traindiff.present.viewer.catalog import Catalog
from traindiff.present.viewer.listing import Listing, curve
from traindiff.present.viewer.looks import Looks
from traindiff.present.viewer.stored_catalog import StoredCatalog
from traindiff.storage import RecordingWriter, open_recording


def losing(values: Callable[[int], float]) -> Edit:
    def edit(step: int, sites: Step) -> None:
        sites["loss", "", "loss", "backward"] = Seen(values=np.array(values(step), np.float32))

    return edit


falling = losing(lambda step: 4.0 / (1 + step))
GRADIENT = ("grad", "", "fc.weight", "grad")
GPT = {**CONTENT, "model": "GPT"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    record(tmp_path / "root" / "good", falling, steps=4, content=GPT)
    record(tmp_path / "root" / "again", falling, steps=4, content={**CONTENT, "model": "Llama"})
    record(tmp_path / "root" / "runs" / "other", both(falling, scaled(GRADIENT, 1e-2, step=1)), steps=4, content=GPT)
    return tmp_path / "root"


@pytest.fixture
def listing(root: Path) -> Iterator[Listing]:
    asks = Looks(str(root))
    yield Listing(Catalog(root), asks)
    asks.close()


def complete(listing: Listing, **about: str) -> str:
    """The page when everything is known."""
    until = time.monotonic() + 120
    while "still to be read" in (page := listing.write(**about)):
        assert time.monotonic() < until
        time.sleep(0.1)
    return page


def rows(page: str) -> dict[str, list[str]]:
    """By name of the recording, the texts of its cells before the date."""
    cells = [re.findall(r"<td.*?</td>", row, re.DOTALL) for row in page.split("<tr")[2:]]
    texts = [[re.sub(r"<[^>]+>|\s+", " ", cell).strip() for cell in row] for row in cells]
    return {row[1]: [row[0], *row[2:5], row[6]] for row in texts}


def test_each_run_shows_its_model_last_step_loss_and_verdict(listing: Listing) -> None:
    page = complete(listing)
    assert rows(page) == {
        "good": ["pin", "GPT", "3", "1", "healthy"],
        "again": ["pin", "Llama", "3", "1", "healthy"],
        "runs/other": ["pin", "GPT", "3", "1", "healthy"],
    }
    assert page.count('<polyline points="1.0,2.0 ') == 3


def test_losses_come_before_scales_and_what_no_step_ended_is_left_out(tmp_path: Path) -> None:
    def logging(step: int, sites: Step) -> None:
        sites["loss", "", "grad_scale", "logged"] = Seen(values=np.array(1024.0))
        sites["loss", "", "my_loss", "logged"] = Seen(values=np.array(3.0 - step))

    path = record(tmp_path / "run", logging, steps=4)
    found = looking.look(str(path), size_bytes=1000)

    assert (found.name, found.losses[-1]) == ("my_loss (logged)", (3, 0.0))
    assert looking._last_finished(12, {"ended": {"steps": {"optimizer": 12, "other": 11}}}) == 11
    assert looking._last_finished(3, {"ended": {"steps": {"optimizer": 12}}}) == 3
    assert looking._last_finished(0, {"ended": {"steps": {"optimizer": 0}}}) is None
    assert looking._last_finished(5, {}) == 5


def test_the_runs_are_compared_with_the_baseline_that_is_pinned(listing: Listing) -> None:
    page = complete(listing, baseline="good")
    assert {name: (row[0], row[-1]) for name, row in rows(page).items()} == {
        "good": ("unpin", "healthy"),
        "again": ("pin", "identical"),
        "runs/other": ("pin", "diverged"),
    }
    assert 'href="/compare?baseline=good&amp;candidate=runs/other"' in page
    assert "unpin" not in listing.write(baseline="../secret")


@pytest.mark.parametrize(
    ("search", "found"),
    [("gpt", {"good", "runs/other"}), ("GPT runs", {"runs/other"}), ("healthy", {"good", "again", "runs/other"}),
     ("<b>", set())],
)  # fmt: skip
def test_runs_are_searched_by_name_model_and_verdict(listing: Listing, search: str, found: set[str]) -> None:
    complete(listing)
    page = listing.write(search=search)
    assert set(rows(page)) == found
    assert "<b>" not in page


def test_nothing_is_read_again_that_has_not_changed(
    root: Path, listing: Listing, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = complete(listing)
    opened: list[str] = []

    def opening(path: str) -> object:
        opened.append(Path(path).name)
        return open_recording(path)

    monkeypatch.setattr(catalogs, "open_recording", opening)
    monkeypatch.setattr(Looks, "_worked_out", lambda *_: pytest.fail("it was worked out again"))
    assert listing.write() == before
    assert opened == []

    monkeypatch.undo()
    monkeypatch.setattr(catalogs, "open_recording", opening)
    shutil.rmtree(root / "again")
    record(root / "again", falling, steps=6, content=GPT)
    assert rows(complete(listing))["again"] == ["pin", "GPT", "5", "0.66667", "healthy"]
    assert opened == ["again"]


def test_the_size_of_a_recording_is_that_of_its_files_in_any_form(tmp_path: Path, root: Path) -> None:
    shutil.rmtree(root)
    made = compact(record_ranks(tmp_path / "whole"), root / "compact")
    (root / "compact" / "checkpoint.pt").write_bytes(bytes(10**6))  # not of the recording
    shutil.copytree(root / "compact", root / "run.pruned-0123456789ab")  # being made
    shutil.copytree(root / "compact", root / "run.pruned-0123456789ab.unfinished-12")
    settings = {"observe": ["grad"], "ranks": None, "steps": None, "every": 1}
    writer = RecordingWriter(str(root / "of-node"), run={"world_size": 1, "settings": settings}, per_node=True)
    writer.write_rank(CONTENT)
    writer.close()
    catalog = Catalog(root)
    before = catalog.state("compact"), catalog.state("of-node")
    sizes = {one.name: one.size_bytes for one in catalog.recordings()}

    frames = (root / "of-node" / "node-00000.frames").stat().st_size
    assert sizes == {"compact": made.bytes_after, "of-node": frames + (root / "of-node" / "run.json").stat().st_size}
    store = fsspec.filesystem("memory")
    store.put(str(root), "/listing", recursive=True)
    try:
        stored = StoredCatalog("memory://listing")
        assert {one.name: one.size_bytes for one in stored.recordings() if one.name in sizes} == sizes
    finally:
        store.rm("/listing", recursive=True)
    for part in (root / "compact" / "merged" / "observations.arrows", root / "of-node" / "node-00000.frames"):
        part.write_bytes(part.read_bytes() + b"more")
    assert catalog.state("compact") != before[0]
    assert catalog.state("of-node") != before[1]


def test_a_recording_that_ends_its_reader_costs_its_own_row_only(
    listing: Listing, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = (
        "from traindiff.present.viewer import looking; plain = looking.answered; looking.answered = lambda root, asked:"
    )
    dying += " os.abort() if asked['names'] == ['good'] else plain(root, asked)"
    monkeypatch.setattr(looks, "START", f"import os; {looks.START.replace('; main(', f'; {dying}; main(')}")
    page = complete(listing)
    assert {name: row[-1] for name, row in rows(page).items()} == {
        "good": "open", "again": "healthy", "runs/other": "healthy",
    }  # fmt: skip
    assert 'title="the process that read it died"' in page


def test_a_recording_that_takes_long_costs_its_own_row_only(listing: Listing, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = "import time; from traindiff.present.viewer import looking; plain = looking.answered; looking.answered = "
    slow += "lambda root, asked: time.sleep(600) if asked['names'] == ['good'] else plain(root, asked)"
    monkeypatch.setattr(looks, "START", looks.START.replace("; main(", f"; {slow}; main("))
    monkeypatch.setattr(looks, "LIMIT_SECONDS", 15.0)
    page = complete(listing)
    assert {name: row[-1] for name, row in rows(page).items()} == {
        "good": "open", "again": "healthy", "runs/other": "healthy",
    }  # fmt: skip
    assert "takes more than" in page


def test_a_damaged_recording_has_no_verdict_and_hides_no_other(root: Path, listing: Listing) -> None:
    data = root / "good" / "rank-00000" / "observations.arrows"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    page = complete(listing)
    assert {name: row[-1] for name, row in rows(page).items()} == {
        "good": "open", "again": "healthy", "runs/other": "healthy",
    }  # fmt: skip
    assert "is damaged" in page


def test_a_run_that_is_recording_is_not_judged_before_it_is_quiet(
    root: Path, listing: Listing, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(root / "growing", falling, steps=4, content=GPT, close=False)
    assert rows(complete(listing))["growing"] == ["pin", "GPT", "3", "1", "open"]
    monkeypatch.setattr("traindiff.present.viewer.listing.QUIET_SECONDS", 0.0)
    assert rows(complete(listing))["growing"][-1] not in ("open", "")


@pytest.mark.parametrize("steps", [range(40), range(400), range(0, 4000, 10), range(1000, 1400)])
def test_some_losses_of_long_runs_are_shown_up_to_the_last(tmp_path: Path, steps: range) -> None:
    path = str(record(tmp_path / "run", losing(float), steps=steps, build=lambda _: {}))
    found = looking.look(path, size_bytes=1)
    assert (found.last_step, found.losses[-1][0]) == (steps[-1], steps[-1])
    assert all(step == value and step in steps for step, value in found.losses)
    assert looking.SAMPLES // 2 <= len(found.losses) <= looking.SAMPLES
    assert open_recording(path).last_step(0) == steps[-1]


def test_of_large_steps_few_are_read(tmp_path: Path) -> None:
    path = str(record(tmp_path / "run", losing(float), steps=400, build=lambda _: {}))
    found = looking.look(path, size_bytes=looking.MOST_BYTES * 50)
    assert [step for step, _ in found.losses] == [0, 133, 266, 399]


def test_the_loss_of_a_step_is_the_mean_of_its_micro_steps(tmp_path: Path) -> None:
    path = str(record(tmp_path / "run", steps=0, close=False))
    writer = RecordingWriter(path, run=dict(open_recording(path).run), overwrite=True)
    writer.write_rank(CONTENT)
    for step in range(3):
        seen = [Seen(values=np.array(10 * step + at, np.float32), about={"micro_step": at}) for at in range(3)]
        pairs = [observed(("loss", "", "loss", "backward"), one, step=step, order=at) for at, one in enumerate(seen)]
        writer.write_step([one for one, _ in pairs], np.array([summary for _, summary in pairs]))
    writer.close()
    assert looking.look(path, size_bytes=1).losses == [(0, 1.0), (1, 11.0), (2, 21.0)]


def test_a_curve_has_gaps_where_the_loss_is_not_finite() -> None:
    nan = float("nan")
    assert curve([(0, 4.0), (1, 2.0), (2, nan), (3, 2.0), (4, 0.0)]) == ["1.0,2.0 30.5,12.0", "89.5,12.0 119.0,22.0"]
    assert curve([(0, 1.0), (1, 1.0)]) == ["1.0,12.0 119.0,12.0"]
    assert curve([(0, -3e38), (1, 3e38), (9, float("inf"))])
    assert curve([(0, 1.0)]) == []
    assert curve([]) == []
