"""A verdict as Markdown."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tests.made_up import FC, Compared, at, both, record
from tests.present.hostile import NAME, TABLE, hostile_pair
from traindiff.analyse.check import Verdict, check
from traindiff.analyse.compare import Comparison, Pinned, Verification, compare
from traindiff.analyse.compare.investigation import Matrix, MatrixRow
from traindiff.analyse.compare.verification import CompilerLog, FailedRank, FailedRun, SideOfVerification
from traindiff.present.data.as_markdown import MOST, code, escaped, write

GRADIENT = ("grad", "", "fc.weight", "grad")
SIDES = (SideOfVerification(recipe="a", setup={}, message=""), SideOfVerification(recipe="b", setup={}, message=""))
BIAS = ("grad", "", "fc.bias", "grad")


def markdown(result: Comparison | Verification | Verdict | Matrix) -> str:
    file = io.StringIO()
    write(result, file)
    return file.getvalue()


def test_equal_runs_are_two_lines(tmp_path: Path) -> None:
    text = markdown(compare(record(tmp_path / "b"), record(tmp_path / "c")))

    assert text == (
        "### ✅ traindiff: identical: every recorded tensor has the same bits, over 3 steps (0 to 2)\n\n"
        f"baseline `{tmp_path}/b`, candidate `{tmp_path}/c`\n"
    )


def test_the_first_divergence_is_quoted_and_further_findings_are_a_table(compared: Compared) -> None:
    nan = at(BIAS, lambda values: values * float("nan"), step=2)
    text = markdown(compared(both(at(FC, lambda values: values * 2, step=1), nan)))

    assert text.startswith("### ❌ traindiff: diverged (uncalibrated): the numbers part, over 3 steps (0 to 2)\n")
    assert "**First divergence:** step 1, micro-step 0, forward, `fc output[0]`\n\n> The candidate's is 2 x the" in text
    assert "<details><summary>Further findings: 1</summary>" in text
    assert "| 2 | grad | `fc.bias grad` | The candidate holds" in text


def test_findings_end_with_the_command_that_explains_them(compared: Compared) -> None:
    nan = at(BIAS, lambda values: values * float("nan"), step=2)
    result = compared(both(at(FC, lambda values: values * 2, step=1), nan))
    text = markdown(result)
    first, further = (one.kind for one in result.findings)

    assert f"\n> <br>more: traindiff explain {first}\n" in text
    assert f"\n\nmore: traindiff explain {further}\n\n</details>" in text


def test_a_check_and_a_verification_are_summaries_too(tmp_path: Path, compared: Compared) -> None:
    assert markdown(check(record(tmp_path / "run"))).startswith("### ✅ traindiff: healthy: no rule is broken")
    result = compared(at(FC, lambda values: values * 2, step=1))
    pinned = Pinned(step=1, precision="float32", comparison=result)
    text = markdown(Verification(comparison=result, sides=SIDES, output="out", pinned=(pinned,)))

    assert "given the baseline's tensors, 1 site is wrong alone:" in text


def test_a_candidate_that_failed_does_not_pass(compared: Compared) -> None:
    rank = FailedRank(rank=0, how="raised", message="rank 0 raised ValueError: <b>", num_steps=2)
    failed = FailedRun(run="candidate", first=0, ranks=(rank,))
    text = markdown(Verification(comparison=compared(), sides=SIDES, output="out", failed=failed))

    assert text.startswith("### ⚠️ traindiff: incomplete; the free runs are identical: every recorded tensor")
    assert "**The run `candidate` failed.** rank 0 raised ValueError: &lt;b&gt;" in text


def test_what_the_terminal_says_of_a_verification_is_there_too(compared: Compared) -> None:
    log = CompilerLog(graph_breaks=("a print",), recompiles=(), num_guards=3, file="compiler.log")
    result = Verification(
        comparison=compared(), sides=SIDES, output="out", compiler=log, zoom_note="No operator was recorded."
    )

    for line in ("Compiler: 1 graph break, 0 recompilations, 3 guards; see compiler.log.", "No operator was recorded."):
        assert line in str(result)
        assert line in markdown(result)


def test_a_matrix_is_a_table_of_its_combinations() -> None:
    row = MatrixRow(
        name="engine=ddp", varied={}, verdict="diverged", message="step 1, a|b", seconds=1, output="out/1", exit_code=1
    )
    matrix = Matrix(recipe="train.py:recipe", output="out", rows=(row, replace(row, verdict="identical", exit_code=0)))
    text = markdown(matrix)

    assert text.startswith("### ❌ traindiff: 2 combinations: 1 diverged, 1 identical.\n")
    assert "| `engine=ddp` | diverged | step 1, a&#124;b |" in text


def test_no_more_findings_are_listed_than_fit_into_a_comment(compared: Compared) -> None:
    def doubled(step: int, sites: object) -> None:
        for site in list(sites):  # type: ignore[call-overload]
            if site[0] in ("forward", "backward", "grad"):
                at(site, lambda values: values * float("nan"), step=step)(step, sites)  # type: ignore[arg-type]

    result = compared(doubled)
    assert len([line for line in markdown(result).splitlines() if line.startswith("| ")]) <= 2 + MOST


def test_names_of_a_recording_are_neither_markup_nor_links_nor_mentions(tmp_path: Path) -> None:
    text = markdown(compare(*hostile_pair(tmp_path)))
    shown = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)

    assert "<script" not in shown
    assert "<img" not in shown
    assert "<a " not in shown
    assert "<strong>g" not in shown
    assert "@f" not in re.sub(r"<code>.*?</code>", "", shown)
    assert NAME.replace("<", "&lt;").replace(">", "&gt;") in shown


@pytest.mark.parametrize("text", [TABLE, "`", "``a`", "", "a\n\n# b", "***", "<!--"])
def test_any_text_is_itself_as_code_and_as_prose(text: str) -> None:
    plain = re.sub(r"\s+", " ", text)
    for written in (code(text), f"x{escaped(text)}x"):
        (inline,) = [token for token in MarkdownIt().parse(written) if token.type == "inline"]
        shown = "".join(child.content for child in inline.children or ())
        assert shown.strip("x ") == plain.strip("x ")
