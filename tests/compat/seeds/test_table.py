"""SEEDS.md: its rows, its counts, and what becomes of a section that is written again."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from benchmarks.seeds import __main__ as program
from benchmarks.seeds.environments import NoEnvironmentError, python_of
from benchmarks.seeds.table import Feature, compared, differing, document, section, sections

WORKS = Feature(name="a | b", outcome="works", note="bytes\nequal")
DIFFERS = Feature(name="c", outcome="differs", note="because")
MISSING = Feature(name="d", outcome="missing", note="nothing came")


def test_a_document_counts_the_rows_of_its_sections() -> None:
    text = document({
        "One": section("One", "source", [WORKS, DIFFERS]),
        "Two": section("Two", "source", [MISSING]),
    })  # fmt: skip

    assert "| a \\| b | works | bytes equal |" in text
    assert "| One | 2 | 1 | 1 | 0 |\n| Two | 1 | 0 | 0 | 1 |\n| *all* | 3 | 1 | 1 | 1 |" in text
    assert document(sections(text)) == text


def test_a_row_of_a_comparison_that_found_a_problem_says_so() -> None:
    assert compared("x", "", "equal").outcome == "works"
    assert differing("x", "", "on purpose").outcome == "differs"
    assert compared("x", "3 lines differ", "equal") == differing("x", "3 lines differ", "on purpose")
    assert compared("x", "3 lines differ", "equal").note == "3 lines differ"


def test_one_system_is_run_again_and_the_sections_of_the_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [WORKS]
    for name in ("msprobe", "onnxruntime"):
        made = ModuleType(f"benchmarks.seeds.{name}")
        made.__dict__.update(TITLE=name.upper(), PACKAGES=(), features=lambda original: rows)
        made.__dict__.update(REPOSITORY="https://a.b/c", COMMIT="0123456789")
        monkeypatch.setitem(sys.modules, made.__name__, made)
    file = tmp_path / "SEEDS.md"

    assert program.main(["onnxruntime", "msprobe", "--output", str(file)]) == 0
    before = file.read_text()
    rows[:] = [MISSING]
    assert program.main(["msprobe", "--output", str(file)]) == 1

    after = sections(file.read_text())
    assert list(after) == ["MSPROBE", "ONNXRUNTIME"]  # as in SYSTEMS
    assert "Original: https://a.b/c at 0123456, deepspeed==" in after["MSPROBE"]
    assert "| d | missing | nothing came |" in after["MSPROBE"]
    assert after["ONNXRUNTIME"] == sections(before)["ONNXRUNTIME"]


def test_a_system_that_is_unknown_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        program.main(["msprob"])
    assert "msprob is not a system; known: model_stepper, compare_loss, msprobe" in capsys.readouterr().err


def test_an_environment_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    with pytest.raises(NoEnvironmentError, match=r"the environment of x cannot be made: .*Invalid requirement"):
        python_of("x", ("no requirement at all",), folder=tmp_path)
    assert not (tmp_path / "x" / "ready").exists()


def test_an_environment_is_made_once(tmp_path: Path) -> None:
    assert python_of("x", ()) is None
    ready = tmp_path / "x" / "ready"
    ready.parent.mkdir()
    ready.write_text("one==1\ntwo==2")
    assert python_of("x", ("one==1", "two==2"), folder=tmp_path) == tmp_path / "x" / "bin" / "python"
