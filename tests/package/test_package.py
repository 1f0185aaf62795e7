"""The wheel and the sdist hold what a user needs. `make package` builds both and runs this."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import traindiff

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "traindiff"
DIST = ROOT / "dist"
MOST_BYTES = 3_000_000


@pytest.fixture(scope="module")
def wheel() -> Path:
    return DIST / f"traindiff-{traindiff.__version__}-py3-none-any.whl"


@pytest.fixture(scope="module")
def sdist() -> Path:
    return DIST / f"traindiff-{traindiff.__version__}.tar.gz"


def installed_files() -> set[str]:
    """The files of the package in the source tree, without what Python compiles."""
    return {
        path.relative_to(SOURCE.parent).as_posix()
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def installed_pages() -> set[str]:
    """The pages of the documentation, and the schemas, which `traindiff explain` prints."""
    docs = ROOT / "docs"
    return {
        f"traindiff/docs/{path.relative_to(docs).as_posix()}"
        for path in docs.rglob("*")
        if path.suffix in (".md", ".json") and not path.is_relative_to(docs / "reference")  # which `make docs` writes
    }


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}

    assert names == installed_files() | installed_pages()
    assert "traindiff/storage/FORMAT.md" in names
    assert "traindiff/py.typed" in names


def test_the_sdist_holds_the_package_and_its_documents_and_no_tests(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    assert {f"src/{name}" for name in installed_files()} <= names
    assert {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "docs/verify.md", "examples/fsdp2.py"} <= names
    assert [name for name in names if name.startswith(("tests", "benchmarks", ".github"))] == []


def test_both_files_are_small(wheel: Path, sdist: Path) -> None:
    assert wheel.stat().st_size < MOST_BYTES
    assert sdist.stat().st_size < MOST_BYTES


def test_the_page_on_the_package_index_has_absolute_links_only(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        page = email.message_from_bytes(archive.read(name))

    links = re.findall(r"\]\(([^)\s]+)", str(page.get_payload()))
    assert len(links) > 20
    assert [link for link in links if not link.startswith("https://")] == []
    assert page["License-Expression"] == "Apache-2.0"
    assert any("uPlot-LICENSE" in file for file in page.get_all("License-File", []))


def test_the_package_in_the_wheel_compares_recordings_and_writes_a_report(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    recording = next(path.parent for path in sorted((ROOT / "tests" / "golden" / "v1").rglob("run.json")))
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'installed')!r}); import traindiff.cli;"
        f"assert traindiff.__file__.startswith({str(tmp_path)!r});"
        f"sys.argv = ['traindiff', 'report', {str(recording)!r}, {str(recording)!r}, '-o', 'report.html'];"
        "traindiff.cli.main()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=120, check=True, capture_output=True)

    explain = code.replace(code[code.index("'report'") : code.index("]", code.index("'report'"))], "'explain', 'maps'")
    said = subprocess.run(
        [sys.executable, "-c", explain], cwd=tmp_path, timeout=120, check=True, capture_output=True, text=True
    )

    assert said.stdout == (ROOT / "docs" / "maps.md").read_text()
    assert "uPlot" in (tmp_path / "report.html").read_text(encoding="utf-8")
