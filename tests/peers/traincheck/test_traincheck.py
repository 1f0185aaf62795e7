"""The silent errors that TrainCheck lists: found in the faulty programs, and nothing in the healthy ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

import traindiff
from tests.peers.traincheck.running import checked
from tests.run.script.running_scripts import recorded_warm
from tests.warm_process import ROOT

PROGRAMS = Path(__file__).parent / "programs"
PAGE = Path(__file__).parent / "README.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What `traindiff check` says of a faulty program.

    Attributes:
        kind: Of a finding or warning.
        path: Where the first such finding is.
        step: Its step.
        says: A part of its sentence.
    """

    kind: str
    path: str = ""
    step: int = 0
    says: str


FOUND = {
    "baichuan2_86": Expected(
        kind="constant-output", path="transfer", step=12, says="The first output that is zero is transfer output[0]."
    ),
    "deepspeed_1801": Expected(
        kind="ranks-disagree", path="norm.weight", says="Were gradients clipped or scaled on some ranks only?"
    ),
    "deepspeed_5794": Expected(
        kind="interrupted", path="experts", step=4, says="after experts.gate had returned and before experts did"
    ),
    "lightning_thunder_725": Expected(
        kind="missed-by-autocast", path="layers.2", says="autocast does not reach its product"
    ),
    "mmpretrain_702": Expected(
        kind="frozen-stages", path="backbone.stages.0.0.bias", says="no stage is frozen"
    ),
    "pytorch_104336": Expected(
        kind="ranks-disagree", path="0.weight", says="No two ranks hold the same: was it never reduced?"
    ),
    "pytorch_115607": Expected(
        kind="stopped", path="0.weight", step=7, says="The optimizer's own count of its steps stays at 6."
    ),
    "pytorch_51800": Expected(
        kind="no-spectral-norm", path="0.weight", says="is evaluated before its spectral norm was estimated"
    ),
    "pytorch_84803": Expected(
        kind="zero-batch", step=9, says="All inputs are zero for the second half of the batch"
    ),
    "pytorch_96600": Expected(kind="ranks-disagree", path="0.weight", step=2, says="What rank 1 holds is all zero."),
    "pytorch_forum_84911": Expected(
        kind="idle-optimizer", path="optimizer.groups[0]", says="none of its 2 parameters requires a gradient"
    ),
    "stackoverflow_60335387": Expected(
        kind="carried-gradient", path="0.weight", step=1, says="Was zero_grad() left out?"
    ),
    "stackoverflow_67180955": Expected(
        kind="repeated-batch", step=1, says="do the workers of a loader draw the same random numbers?"
    ),
    "transformers_33844": Expected(
        kind="random-evaluation", path="attention", step=1, says="it has dropout = 0.1: does it drop out in a function"
    ),
    "transformers_34204": Expected(
        kind="single-sample-input", step=1, says="input.input_ids has 1 sample and input.pixel_values has 32"
    ),
    "x_jxmnop_ddp_out_of_sync": Expected(
        kind="ranks-disagree", path="0.weight", step=1, says="No two ranks hold the same: was it never reduced?"
    ),
}  # fmt: skip

NOT_FOUND = {
    "transformers_17877": "no number of the training is wrong: the parameters are drawn again, from the same "
    "distribution, before a recording begins",
    "transformers_23723": "what the model computes is right: the loop around it generates too many tokens",
}
"""Programs whose error a recording does not show, and why."""

NAMES = sorted(path.stem for path in PROGRAMS.glob("*.py") if path.stem not in ("__init__", "tasks"))


def test_there_are_18_errors_of_which_a_rule_finds_16() -> None:
    assert sorted([*FOUND, *NOT_FOUND]) == NAMES
    assert (len(NAMES), sum(bool(one.kind) for one in FOUND.values())) == (18, 16)


@pytest.mark.parametrize("name", NAMES)
def test_a_healthy_program_is_healthy_without_a_warning(name: str, tmp_path: Path) -> None:
    verdict = checked(name, tmp_path / "run", faulty=False)

    assert (verdict.verdict, verdict.findings, verdict.warnings) == ("healthy", (), ())


@pytest.mark.parametrize("name", FOUND)
def test_a_faulty_program_is_found(name: str, tmp_path: Path) -> None:
    expected = FOUND[name]

    verdict = checked(name, tmp_path / "run", faulty=True)

    found = [one for one in (*verdict.findings, *verdict.warnings) if one.kind == expected.kind]
    assert (found[0].step, found[0].path) == (expected.step, expected.path)
    assert expected.says in found[0].message


@pytest.mark.parametrize("name", ["mmpretrain_702", "pytorch_115607", "pytorch_84803"])
def test_traindiff_run_finds_the_same(name: str, tmp_path: Path) -> None:
    ended = recorded_warm("-m", "tests.peers.traincheck.running", name, "--faulty", output=tmp_path / "run", cwd=ROOT)
    verdict = traindiff.check(tmp_path / "run")

    assert ended.code == 0, ended.errors
    assert FOUND[name].kind in {one.kind for one in (*verdict.findings, *verdict.warnings)}


@pytest.mark.parametrize("name", NOT_FOUND)
def test_what_is_not_found_is_said_to_be_so(name: str, tmp_path: Path) -> None:
    verdict = checked(name, tmp_path / "run", faulty=True)

    assert (verdict.verdict, verdict.findings, verdict.warnings) == ("healthy", (), ())


@pytest.mark.parametrize("name", NAMES)
def test_the_page_lists_every_error(name: str) -> None:
    (row,) = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| `{name}` |")]

    assert FOUND[name].kind in row if name in FOUND else "not found" in row
