"""`traindiff verify`: what it prints where, and how it exits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from tests.run.verify.recipes import one_thread
from traindiff.cli.commands import app
from traindiff.cli.setup_options import run_progress

SCRIPT = """
from torch import nn
from tests.run.verify.recipes import doubled_gradient, mlp, other_gelu

recipe = mlp()
wrong = mlp(other_gelu)
wrong_gradient = mlp(before_step=doubled_gradient)
other_start = mlp(lambda model: nn.init.zeros_(model[3].bias))

def failing():
    raise FileNotFoundError("no data here")
"""

Command = Callable[..., Result]


@pytest.fixture(autouse=True, scope="module")
def threads() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture
def verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run the command in a directory with the script, two steps of two replicas."""
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Result:
        few = ("--steps", "2", "--replica", "ulp:1", "--replica", "ulp:2", "--no-repeat")
        return CliRunner().invoke(app, ["verify", "train.py:recipe", *few, *arguments], catch_exceptions=False)

    return run


def test_the_same_recipe_again_exits_with_zero(verify: Command) -> None:
    result = verify("--repeat")

    assert result.exit_code == 0
    assert result.stdout.startswith(
        "baseline   train.py:recipe (plain)\ncandidate  train.py:recipe (plain)\nfiles      traindiff-verify\n\n"
        "Your baseline's own noise is 0: run again, it gives the same bits.\n\n"
        "identical: every recorded tensor has the same bits, over 2 steps (0 to 1)\n"
    )
    assert result.stdout.splitlines()[-1].startswith("5 runs, 10 steps, ")
    assert result.stderr == ""


def test_a_divergence_is_pinned_down_and_exits_with_one(verify: Command) -> None:
    result = verify("--candidate", "train.py:wrong_gradient")

    assert result.exit_code == 1
    assert "First divergence: step 0, micro-step 0, grad, 3.weight grad" in result.stdout
    heading = "Pinned down, step 0, in its own dtypes: given the baseline's tensors, 1 site is wrong alone:"
    assert heading in result.stdout
    row = result.stdout.partition(heading)[2].splitlines()[2]
    assert row.split()[:6] == ["grad", "3.weight", "grad", "The", "candidate's", "is"]


def test_without_rows_sites_that_are_wrong_alone_are_still_named(verify: Command) -> None:
    result = verify("--candidate", "train.py:wrong", "--top", "0")

    assert "2 sites are wrong alone:\n  1 output[0] (forward), 0 output[0] (backward)\n" in result.stdout


def test_misaligned_runs_exit_with_three(verify: Command) -> None:
    result = verify("--candidate", "train.py:other_start")

    assert result.exit_code == 3
    assert "misaligned" in result.stdout
    assert "Pinned down" not in result.stdout


@pytest.mark.parametrize(
    ("candidate", "pin", "code", "pinned"), [("wrong", "never", 1, []), ("recipe", "always", 0, [1])]
)
def test_pin_says_when_to_pin_down(candidate: str, pin: str, code: int, pinned: list[int], verify: Command) -> None:
    result = verify("--candidate", f"train.py:{candidate}", "--pin", pin, "--json")

    assert result.exit_code == code
    assert [one["step"] for one in json.loads(result.stdout)["pinned"]] == pinned


def test_json_is_all_that_is_on_standard_output(verify: Command) -> None:
    result = verify("--candidate", "train.py:wrong", "--pin", "divergence", "--json")

    assert result.exit_code == 1
    assert [one["step"] for one in json.loads(result.stdout)["pinned"]] == [0]

    found = json.loads(result.stdout)
    assert found["schema"] == {"name": "traindiff-verification", "version": 1}
    assert (found["verdict"], found["calibrated"], found["unaligned"]) == ("diverged", True, [[], []])
    first = found["first_divergence"]
    assert (first["step"], first["micro_step"], first["rank"]) == (0, 0, 0)
    assert (first["phase"], first["site"], first["slot"]) == ("forward", "1", "output[0]")
    assert first["ratio"] > 1
    assert first["message"]
    assert first["kind"]
    assert found["findings"][0] == first
    assert found["pin_note"] == ""
    assert {"step", "precision", "comparison"} == set(found["pinned"][0])
    assert {"name", "num_steps", "seconds"} == set(found["costs"][0])


def test_an_equal_candidate_has_no_first_divergence_in_the_json(verify: Command) -> None:
    assert json.loads(verify("--json").stdout)["first_divergence"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--replica", "ulb:1"), 'Did you mean "ulp"?'),
        (("--candidate", "train.py:worng"), 'Did you mean "wrong"?'),
        (("--candidate", "missing.py:recipe"), "missing.py does not exist."),
        (("--candidate", "train.py:failing"), "calling it raised FileNotFoundError: no data here"),
        (("--rtol", "-1"), "must be a number from 0 up."),
        (("--rename", "x"), 'has no "=".'),
        (("--output", "train.py"), "train.py"),
    ],
)
def test_what_cannot_be_used_is_explained_on_standard_error_and_exits_with_two(
    arguments: tuple[str, ...], message: str, verify: Command
) -> None:
    result = verify(*arguments)

    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert not Path("traindiff-verify").exists()


@pytest.mark.parametrize("option", [("--pin", "allways"), ("--steps", "0")])
def test_options_that_do_not_exist_exit_with_two(option: tuple[str, str], verify: Command) -> None:
    assert verify(*option).exit_code == 2


def run(*arguments: str) -> Result:
    few = ("--steps", "1", "--replica", "ulp:1", "--replica", "ulp:2", "--no-repeat")
    return CliRunner().invoke(
        app, ["verify", "tests.run.verify.divided:recipe", *few, *arguments], catch_exceptions=False
    )


def test_an_engine_is_run_on_two_ranks_and_its_report_is_left_with_the_recordings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    result = run("--engine", "ddp", "--gradient_accumulation_steps=2", "--iterations", "1", "--dtype", "torch.float32")

    assert result.exit_code == 0
    message = "candidate  tests.run.verify.divided:recipe (ddp, nproc=2, gradient_accumulation_steps=2)\n"
    assert message in result.stdout
    assert message in Path("traindiff-verify/report.txt").read_text()
    assert json.loads(Path("traindiff-verify/verification.json").read_text())["sides"][1]["setup"]["nproc"] == 2
    assert sorted(path.name for path in Path("traindiff-verify/logs/candidate").iterdir()) == [
        "rank-0.txt",
        "rank-1.txt",
    ]


def test_what_cannot_be_run_here_exits_with_two_before_anything_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    result = run("--engine", "plain", "--nproc", "2", "--zero_stage", "1")

    assert (result.exit_code, result.stdout) == (2, "")
    assert "2 problems in verify(...); nothing was done." in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_matrix_prints_a_table_and_a_line_as_each_combination_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("grid.toml").write_text("[grid]\nnproc = [1, 2]\n")

    result = run("--matrix", "grid.toml", "--candidate", "tests.run.verify.divided:other_epsilon", "--pin", "never")

    assert result.exit_code == 1
    assert result.stderr == "nproc=1: diverged\nnproc=2: impossible\n"
    assert result.stdout.splitlines()[-1] == "2 combinations: 1 diverged, 1 impossible."
    again = run(
        "--matrix", "grid.toml", "--candidate", "tests.run.verify.divided:other_epsilon", "--pin", "never", "-f", "csv"
    )
    assert again.stdout.splitlines()[0] == "name,verdict,message,seconds,output,exit_code,kept"
    assert again.stdout.splitlines()[1].endswith(",traindiff-verify/nproc=1,1,True")


def test_the_bar_counts_all_steps_and_grows_with_further_runs() -> None:
    console = Console(force_terminal=True, width=100, record=True)

    with console.capture() as capture, run_progress(console, steps=4) as on_step:
        on_step("baseline", 2, 2)
        on_step("candidate", 2, 2)
        on_step("pinned-step-0-native/baseline", 1, 3)

    assert "5/7" in capture.get()


def test_the_bar_makes_room_for_what_else_is_printed() -> None:
    console = Console(force_terminal=True, width=100)

    with console.capture() as capture, run_progress(console, steps=4) as bar:
        bar("baseline", 2, 2)
        with bar.hidden():
            console.print("a stage")
        bar("candidate", 2, 2)

    before, _, after = capture.get().partition("a stage\n")
    assert "2/4" in before
    assert "4/4" in after


def test_without_a_terminal_there_is_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with run_progress(Console(force_terminal=False), steps=4) as on_step:
        on_step("baseline", 1, 4)

    assert capsys.readouterr() == ("", "")


def test_options_that_a_resumed_candidate_does_not_follow_are_refused(verify: Command) -> None:
    result = verify("--resume-at", "1", "--rtol", "1e-3", "--zoom", "--map", "map.toml", "--format", "csv")

    assert (result.exit_code, result.stdout) == (2, "")
    assert "; nothing was run." in result.stderr
    for option in ("--replica", "--no-repeat", "--rtol", "--zoom", "--map", "--format"):
        assert f"\n  {option}\n    has no effect with --resume-at" in result.stderr


def test_combinations_cannot_be_run_again_without_a_grid(verify: Command) -> None:
    result = verify("--fresh")

    assert (result.exit_code, result.stdout) == (2, "")
    assert "there is no --matrix" in result.stderr
