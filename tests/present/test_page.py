"""A result as one HTML file."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.made_up import FC, HEAD, Compared, Seen, Step, at, both, record, rotated, scaled
from tests.present.hostile import ATTRIBUTE, CLOSING, NAME, TABLE, hostile_pair
from traindiff.analyse.check import Verdict, check
from traindiff.analyse.compare import Comparison, compare
from traindiff.core.site import printable
from traindiff.errors import ConfigError
from traindiff.present.page import page_of, write
from traindiff.present.page.sites import HIGHEST, LOWEST, STEPS, log_codes, packed

GRADIENT = ("grad", "", "fc.weight", "grad")


def written(result: Comparison | Verdict, **options: Any) -> str:
    file = io.StringIO()
    write(page_of(result), file, **options)
    return file.getvalue()


class Elements(HTMLParser):
    """Names, attributes and texts of a document, and what its scripts hold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self._within = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs
        self._within = tag

    def handle_endtag(self, _tag: str) -> None:
        self._within = ""

    def handle_data(self, data: str) -> None:
        (self.scripts if self._within == "script" else self.texts).append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.texts))

    @property
    def data(self) -> Any:
        return json.loads(self.scripts[0])


def unpacked(block: Any) -> Any:
    """An array of a page as its script reads it."""
    kind = np.dtype({"Uint16Array": "<u2", "Float32Array": "<f4", "Float64Array": "<f8"}[block["type"]])
    planes = np.frombuffer(zlib.decompress(base64.b64decode(block["data"])), np.uint8).reshape(kind.itemsize, -1)
    return np.frombuffer(np.ascontiguousarray(planes.T).tobytes(), kind).reshape(block["shape"])


def sizes(block: Any) -> Any:
    """Sizes that stand on a page as codes."""
    codes = unpacked(block).astype(np.float64)
    values = 2.0 ** (LOWEST + (codes - 2) * (HIGHEST - LOWEST) / STEPS)
    return np.where(codes == 0, np.nan, np.where(codes == 1, 0, np.where(codes == 65535, np.inf, values)))


def test_sizes_survive_their_encoding_to_a_thousandth() -> None:
    values = np.array([[0.0, np.nan, np.inf, 1.0], [-2.5, 1e-12, 3.4e38, 7e-5]])

    np.testing.assert_allclose(sizes(packed(log_codes(values))), np.abs(values), rtol=1.1e-3)
    np.testing.assert_array_equal(unpacked(packed(values)), values)


def test_sizes_beyond_the_scale_are_at_its_ends() -> None:
    np.testing.assert_allclose(sizes(packed(log_codes(np.array([1e-300, 1e300])))), [2.0**-64, 2.0**128])


def test_the_verdict_and_the_first_divergence_come_first(compared: Compared) -> None:
    text = Elements(written(compared(at(GRADIENT, lambda values: values * 2, step=1), history=True))).text

    assert "diverged (uncalibrated): the numbers part, over 3 steps (0 to 2)" in text
    assert "First divergence: step 1, grad, fc.weight grad" in text.replace("micro-step 0, ", "")
    assert text.index("The candidate's is 2 x the baseline's.") < text.index("by site and step")


def test_every_cell_of_the_heat_map_is_what_was_measured(compared: Compared) -> None:
    result = compared(both(scaled(FC, 1e-3, step=1), scaled(HEAD, 1e-4, step=2)), history=True)
    data = Elements(written(result)).data
    history = result.history
    assert history is not None

    rows = {
        name: at for at, name in enumerate(zip(*(data["rows"][one] for one in ("phase", "path", "slot")), strict=True))
    }
    shown, floors = sizes(data["cells"]["difference"]), sizes(data["cells"]["floor"])

    assert shown.shape == (len(history.whole.sites), 3)
    for key, line in history.whole.sites.items():
        row = rows[key.phase, key.path or "(root)", key.slot]
        np.testing.assert_allclose(shown[row], history.whole.of("difference")[line], rtol=1.1e-3)
        np.testing.assert_allclose(floors[row], history.whole.of("floor")[line], rtol=1.1e-3)


def test_every_cell_has_its_word(compared: Compared) -> None:
    data = Elements(written(compared(both(rotated(FC, 1e-2), rotated(HEAD, 2e-2)), history=True))).data
    words, names = unpacked(data["words"]["values"]), data["words"]["names"]

    found = {
        path: [names[code - 1] for code in words[row]]
        for row, (phase, path) in enumerate(zip(data["rows"]["phase"], data["rows"]["path"], strict=True))
        if phase == "forward"
    }
    assert found == {"fc": ["above"] * 3, "head": ["follows"] * 3}


def test_the_first_difference_in_bits_is_a_link_beside_the_first_divergence(compared: Compared) -> None:
    edit = both(scaled(FC, 1e-7, step=0), at(GRADIENT, lambda values: values * 2, step=1))
    page = Elements(written(compared(edit, history=True)))

    assert "First difference in bits: step 0, micro-step 0, forward, fc output[0]. The bits differ by" in page.text
    assert "1 above their floors" in page.text
    same = Elements(written(compared(scaled(FC, 0.1), history=True))).text
    assert "First difference in bits: the same place." in same


def test_rows_are_in_the_order_of_execution_phase_by_phase(compared: Compared) -> None:
    rows = Elements(written(compared(history=True))).data["rows"]

    assert [path for phase, path in zip(rows["phase"], rows["path"], strict=True) if phase == "forward"] == [
        "fc",
        "head",
    ]
    assert [path for phase, path in zip(rows["phase"], rows["path"], strict=True) if phase == "backward"] == [
        "head",
        "fc",
    ]
    assert list(dict.fromkeys(rows["phase"])) == [
        "batch",
        "forward",
        "backward",
        "grad",
        "optimizer",
        "update",
        "param",
    ]


def loss(step: int, sites: Step) -> None:
    sites["loss", "", "loss", "backward"] = Seen(values=np.array(3.0 - step, np.float32))


def test_losses_and_the_gradient_norm_are_given_number_by_number(compared: Compared) -> None:
    more = both(loss, at(("loss", "", "loss", "backward"), lambda value: value * np.float32(1.5), step=2))
    first, second = Elements(written(compared(more, baseline_edit=loss, history=True))).data["curves"]

    assert (first["title"], first["baseline"], first["candidate"]) == ("loss (backward)", [3, 2, 1], [3, 2, 1.5])
    assert first["difference"] == [0, 0, 0.5]
    assert second["title"] == "gradient norm, recomputed"
    assert second["baseline"] == second["candidate"]


def test_ranks_have_lines_of_their_own(tmp_path: Path) -> None:
    for rank in range(2):
        record(tmp_path / "b", rank=rank, run={"world_size": 2})
        wrong = at(GRADIENT, lambda values: values * 2, step=1) if rank else lambda step, sites: None
        record(tmp_path / "c", wrong, rank=rank, run={"world_size": 2})
    data = Elements(written(compare(tmp_path / "b", tmp_path / "c", history=True))).data

    row = next(
        at for at, one in enumerate(data["rows"]["path"]) if (data["rows"]["phase"][at], one) == ("grad", "fc.weight")
    )
    ratios = dict(
        zip(
            zip(data["by_rank"]["rows"], data["by_rank"]["ranks"], strict=True),
            sizes(data["by_rank"]["ratio"]),
            strict=True,
        )
    )
    assert ratios[row, 0].tolist() == [0, 0, 0]
    assert ratios[row, 1][1] > 1


def test_what_only_one_run_has_and_what_limits_the_verdict_are_listed(compared: Compared) -> None:
    def extra(step: int, sites: Step) -> None:
        if step > 0:
            sites["forward", "", "router", "output[0]"] = Seen(values=np.ones((5, 2), np.float32))

    result = compared(extra, history=True, run={"versions": {"torch": "9.9"}})
    page = page_of(result)
    text = Elements(written(result)).text

    assert [(run, site, steps) for run, _, site, steps, _ in page.alone] == [
        ("candidate", "router output[0]", "from step 1, in 2 steps")
    ]
    assert all(note in text for note in result.notes)
    assert ("versions.torch", ("", "9.9"), True) in [(one.name, one.values, one.differs) for one in page.settings]


def test_a_check_shows_sizes_and_findings(tmp_path: Path) -> None:
    def broken(step: int, sites: Step) -> None:
        sites["param", "", "fc.weight", "value"] = Seen(values=np.ones((8, 6), np.float32))
        loss(step, sites)

    result = check(record(tmp_path / "run", broken), history=True)
    elements = Elements(written(result))

    assert result.verdict in elements.text
    assert all(finding.message in elements.text for finding in result.findings)
    assert elements.data["curves"][0]["size"] == [3, 2, 1]
    assert sizes(elements.data["cells"]["size"]).shape[1] == 3


@pytest.fixture
def hostile_page(tmp_path: Path) -> str:
    baseline, candidate = hostile_pair(tmp_path)
    return written(compare(baseline, candidate, history=True))


def test_names_of_a_recording_are_text_and_never_markup(hostile_page: str) -> None:
    elements = Elements(hostile_page)

    assert elements.names.count("script") == 2
    assert "img" not in elements.names
    assert [name for name, _ in elements.attributes if name.startswith("on")] == []
    for name in (NAME, CLOSING, ATTRIBUTE):
        assert re.sub(r"\s+", " ", name) in elements.text
        assert name in elements.data["rows"]["path"]
    assert printable(TABLE) in elements.data["rows"]["path"]
    assert "base<b>line" in elements.text


def test_a_page_loads_nothing_and_runs_its_own_script_only(hostile_page: str) -> None:
    elements = Elements(hostile_page)
    (policy,) = [value for name, value in elements.attributes if name == "content" and value and "default-src" in value]

    assert [value for name, value in elements.attributes if name in ("src", "href") and value != "#map"] == []
    assert "url(" not in hostile_page
    assert "@import" not in hostile_page
    digest = base64.b64encode(hashlib.sha256(elements.scripts[-1].encode()).digest()).decode()
    assert policy == (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "connect-src 'none'; base-uri 'none'; form-action 'none'"
    )


def test_only_a_page_that_is_served_asks_whether_there_is_something_new(compared: Compared) -> None:
    result = compared(history=True)

    served = Elements(written(result, refresh="/state?of=run")).attributes
    assert [value for name, value in served if value and "connect-src 'self'" in value] != []
    assert ("data-refresh", "/state?of=run") in served
    assert ("data-refresh", "") in Elements(written(result)).attributes


def test_sections_are_labelled_by_headings_that_are_there(compared: Compared) -> None:
    attributes = Elements(written(compared(at(GRADIENT, lambda values: values * 2, step=1), history=True))).attributes
    ids = {value for name, value in attributes if name == "id"}
    labels = {value for name, value in attributes if name == "aria-labelledby"}

    assert {"verdict", "map-title", "findings-title", "settings-title"} <= labels <= ids
    assert {name for name, _ in attributes if name.startswith("aria-lab")} <= {"aria-label", "aria-labelledby"}


def test_a_result_without_its_history_cannot_be_shown(compared: Compared) -> None:
    with pytest.raises(ConfigError, match=r"Call compare\(\.\.\., history=True\)\."):
        page_of(compared())


def test_runs_that_have_nothing_in_common_have_a_page(tmp_path: Path) -> None:
    result = compare(record(tmp_path / "b", steps=range(2)), record(tmp_path / "c", steps=range(5, 7)), history=True)

    assert result.steps == ()
    assert "incomplete" in Elements(written(result)).text
