"""The main pictures as PNG."""

from __future__ import annotations

import io
import json
import re
import struct
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.made_up import FC, Edit, Seen, Step, record, scaled
from tests.present.hostile import hostile_pair
from traindiff.analyse.check import check
from traindiff.analyse.compare import compare
from traindiff.errors import ConfigError
from traindiff.present import pictures
from traindiff.present.page import page_of, write
from traindiff.present.page.writing import look
from traindiff.present.pictures import write_pictures


def size(path: Path) -> tuple[int, int]:
    """Width and height of a PNG file."""
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])  # type: ignore[return-value]


@pytest.fixture
def matplotlib() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install 'traindiff[png]')")


@pytest.mark.usefixtures("matplotlib")
def test_a_comparison_has_three_pictures(tmp_path: Path) -> None:
    result = compare(record(tmp_path / "b"), record(tmp_path / "c", scaled(FC, 1e-2, step=1)), history=True)
    written = write_pictures(result, tmp_path / "new" / "pictures")

    assert [path.name for path in written] == ["heat-map.png", "curves.png", "dataflow.png"]
    assert all(width > 800 and height > 200 for width, height in map(size, written))


@pytest.mark.usefixtures("matplotlib")
def test_a_check_and_equal_runs_have_no_dataflow(tmp_path: Path) -> None:
    run = record(tmp_path / "b")
    for result in (check(run, history=True), compare(run, record(tmp_path / "c"), history=True)):
        names = [path.name for path in write_pictures(result, tmp_path / "pictures")]
        assert names == ["heat-map.png", "curves.png"]


@pytest.mark.usefixtures("matplotlib")
def test_curves_do_not_zoom_into_the_rounding_of_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    def near_one(odd: float) -> Edit:
        def edit(step: int, sites: Step) -> None:
            sites["loss", "", "loss", "backward"] = Seen(values=np.array(1 + odd * (step % 2)))

        return edit

    shown: dict[str, Any] = {}
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: shown.update({path.stem: self}))
    baseline = record(tmp_path / "b", near_one(0))
    for result in (
        compare(baseline, record(tmp_path / "c", near_one(1e-7)), history=True),
        check(tmp_path / "c", history=True),
    ):
        write_pictures(result, tmp_path / "pictures")
        low, high = shown["curves"].axes[0].get_ylim()
        assert high - low >= 0.99e-3
        assert low < 1 < high


@pytest.mark.usefixtures("matplotlib")
def test_names_are_no_formulas(tmp_path: Path) -> None:
    assert len(write_pictures(compare(*hostile_pair(tmp_path), history=True), tmp_path / "pictures")) == 3


def test_without_matplotlib_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = check(record(tmp_path / "run"), history=True)

    with pytest.raises(ConfigError, match=r"pip install 'traindiff\[png\]'"):
        write_pictures(result, tmp_path / "pictures")
    assert not (tmp_path / "pictures").exists()


def test_pictures_and_pages_have_their_colors_from_one_place(tmp_path: Path) -> None:
    """What a browser runs is read here: its constants stand before the scripts, and no script has others."""
    text = io.StringIO()
    write(page_of(check(record(tmp_path / "run"), history=True)), text)
    (line,) = [line for line in text.getvalue().splitlines() if line.startswith("const LOOK = ")]
    folder = files("traindiff.present.page")
    own = [*folder.joinpath("script").iterdir(), folder.joinpath("page.css")]
    drawn = Path(pictures.__file__).read_text()

    assert json.loads(line.removeprefix("const LOOK = ").removesuffix(";")) == look()
    assert set(look()["dark"]) == set(look()["light"])
    assert all(f"--{name}: {value};" in text.getvalue() for name, value in look()["dark"].items())
    assert [one.name for one in own if re.search(r"#[0-9a-f]{6}\b", one.read_text())] == []
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawn)) <= {"#ffffff"}
