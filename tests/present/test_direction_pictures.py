"""Pictures of similarities: one for each parameter whatever its name, of any number of steps."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from traindiff.analyse.signs import Agreement, Similarities

pytest.importorskip("matplotlib")

from traindiff.present.direction_pictures import draw


def similarities(rows: dict[str, list[int | None]]) -> Similarities:
    """Percentages per step."""
    parameters = {
        name: tuple(None if one is None else Agreement(same=one, count=100) for one in row)
        for name, row in rows.items()
    }
    return Similarities(steps=tuple(range(len(next(iter(rows.values()))))), parameters=parameters, unknown={})


def size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", content[16:24])
    return width, height


@pytest.mark.filterwarnings("ignore:Glyph .* missing from font")
@pytest.mark.parametrize(
    "rows",
    [
        {"w": [99, 98, 90]},
        {"w": [50]},
        {"w": [None, 99], "b": [100, None]},
        {
            "$x^2$ $": [99, 100],
            "权重": [99, 99],
            "a/../b": [1, 2],
            "summary": [3, 4],
            "heat_map": [5, 6],
            "n\n": [7, 8],
        },
        {f"layer.{number}.weight": [100 - number % 7] * 3 for number in range(70)},
    ],
    ids=["broken", "one step", "gaps", "any name", "many"],
)
def test_every_parameter_has_its_own_picture(rows: dict[str, list[int | None]], tmp_path: Path) -> None:
    drawn = draw(similarities(rows), tmp_path / "pictures")

    assert len({*drawn}) == len(rows) + 2
    assert {*(tmp_path / "pictures").iterdir()} == {*drawn}
    assert len({path.read_bytes() for path in drawn[: len(rows)]}) == len(rows)
    assert all(size(path) == (760, 360) for path in drawn[:-1])
    width, height = size(drawn[-1])
    assert width == 1320
    assert 384 <= height <= 1320


def test_a_step_that_breaks_the_rule_is_marked(tmp_path: Path) -> None:
    """The same curve, which keeps the rule where it is not the first one to be known."""
    kept, _, _ = draw(similarities({"w": [98, 96, 94]}), tmp_path / "kept")
    broken, _, _ = draw(similarities({"w": [96, 94, 92]}), tmp_path / "broken")
    red = bytes([0xC0, 0x39, 0x2B])
    assert red not in pixels(kept)
    assert red in pixels(broken)


def pixels(path: Path) -> bytes:
    from matplotlib.image import imread

    found: bytes = (imread(path)[..., :3] * 255).round().astype("uint8").tobytes()
    return found


def test_drawing_leaves_the_matplotlib_of_the_process_alone(tmp_path: Path) -> None:
    code = f"""
import sys, matplotlib
names = ("font.size", "text.parse_math", "axes.spines.top")
before = [matplotlib.rcParams[name] for name in names]
from tests.present.test_direction_pictures import draw, similarities
draw(similarities({{"w": [99, 90]}}), __import__("pathlib").Path({str(tmp_path)!r}))
assert [matplotlib.rcParams[name] for name in names] == before
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)
