"""The pytest plugin: golden recordings, made and replaced with `pytest --traindiff-update`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from traindiff.run.testing.golden import Golden

_WRITTEN, _KEPT = "traindiff written", "traindiff kept"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--traindiff-update`, `--traindiff-reports` and the ini option `traindiff_golden`."""
    group = parser.getgroup("traindiff", "golden recordings of trainings")
    group.addoption(
        "--traindiff-update",
        action="store_true",
        help="Keep what trainings compute now as golden recordings, instead of comparing with those that are kept.",
    )
    group.addoption(
        "--traindiff-reports",
        metavar="DIRECTORY",
        help="Where to write the HTML report of a training that differs; a temporary directory, if left out.",
    )
    parser.addini(
        "traindiff_golden",
        "Directory of golden recordings, relative to the file of a test.",
        default="golden-recordings",
    )


@pytest.fixture
def traindiff_golden(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Golden]:
    """Golden recordings of this test: `traindiff_golden.record(model, optimizer)`, `.recipe(...)`, `.check(path)`."""
    from traindiff.run.testing.golden import Golden
    from traindiff.storage.location import file_name

    test = request.node
    assert isinstance(test, pytest.Item)
    owner = "" if request.cls is None else f"{request.cls.__qualname__}."
    golden = Golden(
        directory=test.path.parent / request.config.getini("traindiff_golden") / test.path.stem
        / file_name(f"{owner}{test.name}"),
        scratch=tmp_path / "traindiff",
        reports=Path(request.config.getoption("traindiff_reports") or tmp_path / "traindiff-reports").resolve(),
        update=request.config.getoption("traindiff_update"),
    )  # fmt: skip
    yield golden
    # Reports travel from the workers of pytest-xdist to the process that prints the summary.
    test.user_properties += [(_WRITTEN, str(path)) for path in golden.written]
    test.user_properties += [(_KEPT, str(path)) for path in golden.kept]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print which golden recordings were written, and how many had not changed."""
    found: dict[str, set[str]] = {_WRITTEN: set(), _KEPT: set()}
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name in found:
                    found[name].add(value)
    written, kept = sorted(found[_WRITTEN]), len(found[_KEPT])
    if not written and not kept:
        return
    terminalreporter.section("golden recordings")
    for path in written:
        terminalreporter.line(f"written: {path}")
    if kept:
        terminalreporter.line(f"unchanged: {kept}")
