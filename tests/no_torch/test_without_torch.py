"""What works without torch; `make no-torch` runs this where it is not installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent.parent / "golden" / "v1"
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None\n"


def python(source: str) -> subprocess.CompletedProcess[str]:
    """Run a program in which torch cannot be imported."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", WITHOUT_TORCH + source],
        capture_output=True, text=True, cwd=GOLDEN, timeout=60, check=False,
    )  # fmt: skip


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python(f"sys.argv = ['traindiff', *{arguments!r}]\nfrom traindiff.cli import main\nmain()")


def test_a_divergence_is_found_from_python() -> None:
    import traindiff

    comparison = traindiff.compare(GOLDEN / "baseline", GOLDEN / "candidate")
    first = comparison.first_divergence

    assert comparison.verdict == "diverged"
    assert first is not None
    assert (first.step, first.phase, first.path, first.kind) == (1, "grad", "fc.weight", "scale")


def test_equal_runs_are_identical() -> None:
    import traindiff

    assert traindiff.compare(GOLDEN / "baseline", GOLDEN / "again").verdict == "identical"


@pytest.mark.parametrize(("candidate", "code"), [("again", 0), ("candidate", 1)])
def test_compare_works(candidate: str, code: int) -> None:
    result = command("compare", "baseline", candidate, "--json")

    assert result.stderr == ""
    assert result.returncode == code
    assert json.loads(result.stdout)["calibrated"] is False


@pytest.mark.parametrize("recordings", [("baseline", "candidate"), ("baseline",)])
def test_a_report_is_written(tmp_path: Path, recordings: tuple[str, ...]) -> None:
    result = command("report", *recordings, "--output", str(tmp_path / "report.html"))

    assert result.returncode == 0
    assert "fc.weight" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("form", ["markdown", "junit"])
def test_summaries_are_printed(form: str) -> None:
    result = command("compare", "baseline", "candidate", "--format", form)

    assert (result.returncode, result.stderr) == (1, "")
    assert "fc.weight" in result.stdout


@pytest.mark.parametrize("form", ["text", "csv", "json"])
def test_show_works(form: str) -> None:
    result = command("show", "baseline", "--format", form)

    assert (result.returncode, result.stderr) == (0, "")
    assert "fc.weight" in result.stdout


def test_importing_traindiff_imports_no_torch() -> None:
    modules = "traindiff, traindiff.analyse.compare, traindiff.present.text.results, traindiff.cli.recordings"
    source = f"del sys.modules['torch']\nimport {modules}\n"
    result = python(source + "assert not [name for name in sys.modules if name.partition('.')[0] == 'torch']")

    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("name", ["record", "Recorder"])
def test_recording_says_what_to_install(name: str) -> None:
    result = python(f"import traindiff\ntraindiff.{name}")

    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        f"ModuleNotFoundError: traindiff.{name} needs torch, which is not installed. "
        "Install it with: pip install 'traindiff[torch]'"
    )


def test_inspecting_a_tensor_is_harmless() -> None:
    assert python("import traindiff\nassert traindiff.inspect('x', 3) == 3").returncode == 0
