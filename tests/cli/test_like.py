"""`--like compare_loss`: the documented commands of DeepSpeed's script, and settings with which nothing is compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from tests.cli.test_spellings import read
from tests.observe.sharding.deepspeed_training import NEEDS_DEEPSPEED
from traindiff.cli.commands import app
from traindiff.cli.setup_options import SetupOptions
from traindiff.run.config.options import setups
from traindiff.run.config.setup import Setup
from traindiff.run.processes.present_ranks import launched_ranks

TWO: dict[str, Any] = {"engine": "deepspeed", "nproc": 2}


def sides(given: str, *, world_size: int | None = 2) -> tuple[Setup, Setup]:
    """The setups of baseline and candidate for the original's options."""
    _, options = read("verify", f"--like compare_loss {given}")
    return setups(options, world_size=world_size)


@pytest.mark.parametrize(
    ("given", "baseline", "candidate"),
    [
        ("", Setup(engine="ddp", nproc=2), Setup(**TWO, zero_stage=1, optimizer="engine")),
        (
            "--use_torch_adam --dtype torch.float32 --zero_stage 1",
            Setup(engine="ddp", nproc=2),
            Setup(**TWO, zero_stage=1),
        ),
        (
            "--dtype torch.float16 --rtol 0.05 --atol 0.2",
            Setup(engine="ddp", nproc=2, dtype="float16", precision="master"),
            Setup(**TWO, zero_stage=1, dtype="float16", optimizer="engine"),
        ),
        (
            "--compile --use_torch_adam --dtype torch.float32 --zero_stage 1",
            Setup(engine="ddp", nproc=2, compile=True),
            Setup(**TWO, zero_stage=1, compile=True),
        ),
        (
            "--compile --use_torch_adam --deepcompile --zero_stage 3 --dtype torch.bfloat16",
            Setup(engine="ddp", nproc=2, dtype="bfloat16", precision="master"),
            Setup(**TWO, zero_stage=3, dtype="bfloat16", compile=True, deepcompile=True),
        ),
        (
            "--zero_stage 0 --offload_device cpu --gradient_accumulation_steps 4",
            Setup(engine="ddp", nproc=2, gradient_accumulation_steps=4),
            Setup(**TWO, offload_device="cpu", gradient_accumulation_steps=4, optimizer="engine"),
        ),
    ],
)
def test_a_documented_command_compares_what_the_original_compares(
    given: str, baseline: Setup, candidate: Setup
) -> None:
    assert sides(given) == (baseline, candidate)


def test_a_launcher_with_one_rank_and_none_at_all_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    baseline, candidate = sides("--compile --verbose_logging --zero_stage 1", world_size=launched_ranks())
    assert (baseline.nproc, candidate.nproc, baseline.compile, candidate.compile) == (1, 1, True, True)

    monkeypatch.delenv("RANK")
    assert launched_ranks() is None
    assert [side.nproc for side in sides("", world_size=launched_ranks())] == [2, 2]


@pytest.mark.parametrize(
    ("given", "steps"), [("--like compare_loss", 5), ("--like compare_loss --iterations 3", 3), ("", 4)]
)
def test_it_trains_as_many_iterations_as_the_original_unless_told_otherwise(given: str, steps: int) -> None:
    values = get_command(app).commands["verify"].make_context("verify", given.split()).params  # type: ignore[attr-defined]

    assert SetupOptions(like=values["like"]).steps(values["steps"]) == steps


def test_another_program_is_refused_with_those_that_are_known() -> None:
    result = CliRunner().invoke(app, ["verify", "--like", "compare_lots"])

    assert result.exit_code == 2
    assert "Known: compare_loss." in result.output


def invoke(tmp_path: Path, *given: str) -> Any:
    few = ("--output", str(tmp_path / "runs"), "--replica", "ulp:1", "--replica", "ulp:2", "--no-repeat")
    return CliRunner().invoke(app, ["verify", "tests.run.verify.divided:recipe", *given, *few], catch_exceptions=False)


@NEEDS_DEEPSPEED
def test_torchs_adam_in_float32_is_identical_to_ddp(tmp_path: Path) -> None:
    result = invoke(
        tmp_path, "--like", "compare_loss", "--use_torch_adam", "--dtype", "torch.float32", "--zero_stage", "1",
        "--iterations", "2",
    )  # fmt: skip

    assert result.exit_code == 0, result.output
    assert "baseline   tests.run.verify.divided:recipe (ddp, nproc=2)" in result.output
    assert "candidate  tests.run.verify.divided:recipe (deepspeed, nproc=2, zero_stage=1)" in result.output
    assert "identical: every recorded tensor has the same bits, over 2 steps" in result.output


@pytest.mark.deepspeed
@NEEDS_DEEPSPEED
@pytest.mark.parametrize("stage", range(1, 4))
def test_in_bfloat16_every_stage_is_equivalent_to_ddp(stage: int, tmp_path: Path) -> None:
    result = invoke(
        tmp_path, "--like", "compare_loss", "--use_torch_adam", "--dtype", "torch.bfloat16", "--zero_stage",
        str(stage), "--iterations", "2",
    )  # fmt: skip

    assert result.exit_code == 0, result.output
    assert "equivalent: no difference exceeds its floor, over 2 steps" in result.output


@pytest.mark.parametrize(
    "given",
    [
        ("--dtype", "torch.float16", "--rtol", "0.05", "--atol", "0.2"),
        ("--rtol", "0.05"),
        ("--gradient-clipping", "1.0"),
        ("--engine", "ddp", "--baseline-engine", "ddp"),
        ("--compile", "--baseline-compile"),
    ],
)
def test_settings_with_which_the_candidate_is_the_baseline_are_refused_at_once(
    given: tuple[str, ...], tmp_path: Path
) -> None:
    result = invoke(tmp_path, *given)

    assert result.exit_code == 2
    assert "baseline and candidate are the same training" in result.output
    assert "--like compare_loss" in result.output
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("flag", ["--use_torch_adam", "--use-torch-adam"])
def test_an_optimizer_that_is_named_twice_is_refused_at_once(flag: str, tmp_path: Path) -> None:
    result = invoke(tmp_path, "--engine", "ddp", flag, "--optimizer", "engine")

    assert result.exit_code == 2
    assert "--use-torch-adam means --optimizer torch" in result.output
    assert not (tmp_path / "runs").exists()

    _, options = read("verify", "--engine ddp --use_torch_adam --optimizer torch")
    assert options["optimizer"] == "torch"
