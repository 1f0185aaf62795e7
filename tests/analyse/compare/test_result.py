"""The result as JSON and as text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.made_up import Compared, Step, at, record
from traindiff.analyse.compare import Comparison, compare

FC = ("forward", "", "fc", "output[0]")
FINDING = {
    "step", "evaluation", "micro_step", "rank", "phase", "stage", "site", "slot", "call", "kind", "ratio", "difference",
    "floor", "message", "evidence",
}  # fmt: skip


def _diverged(compared: Compared) -> Comparison:
    def wrong(step: int, sites: Step) -> None:
        at(FC, lambda x: x * 2, step=1)(step, sites)
        at(("grad", "", "fc.bias", "grad"), lambda x: x * np.float32(np.nan), step=1)(step, sites)

    return compared(wrong)


def test_json_holds_what_is_promised(compared: Compared) -> None:
    result = _diverged(compared).to_json()

    assert result["schema"] == {"name": "traindiff-comparison", "version": 1}
    assert result["verdict"] == "diverged"
    assert result["calibrated"] is False
    assert result["steps"] == [0, 1, 2]
    assert result["unaligned"] == [[], []]
    assert result["first_divergence"] == result["findings"][0]
    assert all(set(finding) == FINDING for finding in result["findings"])
    first = result["first_divergence"]
    assert (first["step"], first["phase"], first["site"], first["slot"], first["rank"]) == (
        1,
        "forward",
        "fc",
        "output[0]",
        0,
    )
    assert first["kind"] == "scale"


def test_json_is_json_without_nan_and_infinity(compared: Compared) -> None:
    text = json.dumps(_diverged(compared).to_json(), allow_nan=False)

    assert json.loads(text)["findings"][-1]["difference"] is None


def test_json_of_equal_runs_has_no_divergence(compared: Compared) -> None:
    result = compared().to_json()

    assert (result["verdict"], result["first_divergence"], result["findings"]) == ("identical", None, [])


def test_the_root_module_is_spelt_out_in_json(compared: Compared) -> None:
    result = compared(at(("batch", "", "", "input[0]"), lambda x: x + 1)).to_json()

    assert result["first_divergence"]["site"] == "(root)"


def test_unaligned_sites_in_json(tmp_path: Path) -> None:
    def more(_step: int, sites: Step) -> None:
        sites["forward", "", "attention.scores", "value"] = sites[FC]

    result = compare(record(tmp_path / "b", more), record(tmp_path / "c")).to_json()

    assert result["unaligned"] == [
        [{"phase": "forward", "site": "attention.scores", "slot": "value", "first_step": 0, "num_steps": 3, "why": ""}],
        [],
    ]


def test_the_text_of_a_divergence(compared: Compared) -> None:
    text = str(compared(at(FC, lambda x: x * 2, step=1)))

    assert text == (
        "diverged (uncalibrated): the numbers part, over 3 steps (0 to 2)\n"
        "\n"
        "First divergence: step 1, micro-step 0, forward, fc output[0]\n"
        "  The candidate's is 2 x the baseline's.\n"
        "  relative L2 difference 1 = 2.21e+05 x its floor of 4.53e-06\n"
        "  Everything before it agrees, up to (root) input[0].\n"
        "  First difference in bits: the same place.\n"
        "  more: traindiff explain scale\n"
        "\n"
        "18 sites: 17 identical, 1 above."
    )


def test_the_text_of_equal_runs(compared: Compared) -> None:
    assert str(compared()) == "identical: every recorded tensor has the same bits, over 3 steps (0 to 2)"


def test_the_text_of_one_step(tmp_path: Path) -> None:
    comparison = compare(record(tmp_path / "b"), record(tmp_path / "c"), steps="1")

    assert str(comparison).endswith(", over step 1")


def test_the_text_of_steps_with_gaps(tmp_path: Path) -> None:
    comparison = compare(record(tmp_path / "b"), record(tmp_path / "c"), steps="0,2")

    assert str(comparison).endswith(", over 2 steps (0 to 2, with gaps)")


def test_the_text_names_what_limits_the_verdict(compared: Compared) -> None:
    text = str(compared(steps=2, close=False, run={"environment": {"num_threads": 4}}))

    assert text == (
        "incomplete (uncalibrated): what could be compared agrees, but not everything could be, over 2 steps (0 to 1)\n"
        "\n"
        "First difference in bits: none is known.\n"
        "\n"
        "candidate: rank 0: the recording was not closed (the run was killed, could not write, or still runs).\n"
        "The candidate ends after step 1; 1 later step of the other run was not compared. "
        "(--steps compares a part on purpose.)\n"
        "Circumstances differ (baseline and candidate): num threads none and 4."
    )


def test_each_site_is_found_once_with_the_number_of_steps(compared: Compared) -> None:
    comparison = compared(at(FC, lambda x: -x))

    assert [(finding.path, finding.step, finding.evidence["num_steps"]) for finding in comparison.findings] == [
        ("fc", 0, 3)
    ]


@pytest.mark.parametrize("word", ["identical", "equivalent", "diverged", "misaligned", "incomplete"])
def test_every_word_has_a_meaning_and_an_exit_code(word: str) -> None:
    from traindiff.analyse.story import MEANINGS

    comparison = Comparison(
        baseline="b", candidate="c", verdict=word, calibrated=False, findings=(), unaligned=((), ()), steps=(0,),
        notes=(), differences=(),
    )  # type: ignore[arg-type]  # fmt: skip

    assert MEANINGS[word] in str(comparison)
    assert comparison.exit_code == {"identical": 0, "equivalent": 0, "diverged": 1}.get(word, 3)


def test_the_package_can_be_called_like_its_function(tmp_path: Path) -> None:
    import traindiff
    import traindiff.analyse.compare.verdict

    assert traindiff.compare(record(tmp_path / "b"), record(tmp_path / "c")).verdict == "identical"
