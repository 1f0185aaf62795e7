"""A training under DeepSpeed's engine, on two ranks, against DDP and against the same training on one process."""

from __future__ import annotations

from pathlib import Path

import pytest

import traindiff
from tests.observe.sharding.deepspeed_training import NEEDS_DEEPSPEED
from tests.run.config.runs import Case, compared, run_baselines, run_candidates
from traindiff.run.config.deepspeed_engine import configuration
from traindiff.run.config.setup import Setup

pytestmark = NEEDS_DEEPSPEED

STAGES = (0, 1, 2, 3)

EXACT: dict[str, Case] = {
    "ddp": ("blocks", Setup(engine="ddp")),
    "ddp, clipped": ("blocks", Setup(engine="ddp", gradient_clipping=0.5)),
    "ddp, high limit": ("blocks", Setup(engine="ddp", gradient_clipping=50.0)),
    **{
        f"stage {stage}{name}": ("blocks", Setup(engine="deepspeed", zero_stage=stage, gradient_clipping=limit))
        for stage in STAGES
        for name, limit in (("", 0.0), (", clipped", 0.5), (", high limit", 50.0))
    },
    "gpt, ddp": ("gpt", Setup(engine="ddp")),
    "gpt, stage 1": ("gpt", Setup(engine="deepspeed", zero_stage=1)),
    "gpt, stage 3": ("gpt", Setup(engine="deepspeed", zero_stage=3)),
}


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("exact")
    run_candidates(directory, EXACT)
    return directory


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_is_identical_to_ddp_in_float32_with_torchs_adam(stage: int, exact: Path) -> None:
    comparison = compared(exact / "ddp", exact / f"stage {stage}")

    assert comparison.verdict == "identical", str(comparison)


@pytest.mark.parametrize("stage", STAGES)
def test_a_limit_that_gradients_do_not_reach_changes_no_bit(stage: int, exact: Path) -> None:
    comparison = compared(exact / "ddp, high limit", exact / f"stage {stage}, high limit")

    assert comparison.verdict == "identical", str(comparison)


@pytest.mark.parametrize("stage", STAGES)
def test_clipped_gradients_differ_by_the_rounding_of_their_norm_at_most(stage: int, exact: Path) -> None:
    comparison = compared(exact / "ddp, clipped", exact / f"stage {stage}, clipped")

    assert comparison.verdict in ("identical", "equivalent"), str(comparison)


@pytest.mark.parametrize("stage", [1, 3])
def test_the_built_in_recipe_is_identical_too(stage: int, exact: Path) -> None:
    comparison = compared(exact / "gpt, ddp", exact / f"gpt, stage {stage}")

    assert comparison.verdict == "identical", str(comparison)


@pytest.fixture(scope="module")
def baseline(exact: Path) -> Path:
    return run_baselines(exact, {"ddp, clipped": EXACT["ddp, clipped"]})["ddp, clipped"]


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_is_equivalent_to_one_process(stage: int, exact: Path, baseline: Path) -> None:
    comparison = compared(baseline, exact / f"stage {stage}, clipped")

    assert comparison.verdict == "equivalent", str(comparison)


def test_gradients_are_not_clipped_unless_the_setup_says_so() -> None:
    assert configuration(Setup(engine="deepspeed"))["gradient_clipping"] == 0.0
    assert configuration(Setup(engine="deepspeed", gradient_clipping=2.0))["gradient_clipping"] == 2.0


def test_the_recipes_optimizer_is_not_replaced_by_deepspeeds_when_it_is_offloaded() -> None:
    setup = Setup(engine="deepspeed", zero_stage=2, offload_device="cpu")

    assert configuration(setup)["zero_force_ds_cpu_optimizer"] is False
    assert configuration(setup)["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}


FURTHER: dict[str, Case] = {
    **{
        f"stage {stage}, {name}": ("blocks", Setup(engine="deepspeed", zero_stage=stage, **settings))
        for stage in (1, 2, 3)
        for name, settings in (
            ("in micro-batches", {"gradient_accumulation_steps": 2}),
            ("in bfloat16", {"dtype": "bfloat16"}),
            ("offloaded", {"offload_device": "cpu"}),
        )
    },
    "stage 0 in bfloat16": ("blocks", Setup(engine="deepspeed", dtype="bfloat16")),
}


@pytest.fixture(scope="module")
def further(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    directory = tmp_path_factory.mktemp("further")
    run_candidates(directory, FURTHER)
    return directory, run_baselines(directory, FURTHER)


@pytest.mark.deepspeed
@pytest.mark.parametrize("name", [name for name in FURTHER if not name.startswith("stage 0")])
def test_what_else_it_does_is_equivalent_to_one_process(name: str, further: tuple[Path, dict[str, Path]]) -> None:
    directory, baselines = further

    comparison = compared(baselines[name], directory / name)

    assert comparison.verdict == "equivalent", str(comparison)


@pytest.mark.deepspeed
def test_the_step_that_stage_0_makes_too_many_in_bfloat16_is_found(further: tuple[Path, dict[str, Path]]) -> None:
    directory, baselines = further

    comparison = traindiff.compare(baselines["stage 0 in bfloat16"], directory / "stage 0 in bfloat16")

    assert comparison.verdict == "diverged"
    assert "step-count" in {finding.kind for finding in comparison.findings}


OWN: dict[str, Case] = {
    "fused": ("blocks", Setup(engine="deepspeed", zero_stage=1, optimizer="engine")),
    "on the CPU": ("blocks", Setup(engine="deepspeed", zero_stage=2, optimizer="engine", offload_device="cpu")),
}


@pytest.mark.deepspeed
def test_deepspeeds_own_optimizers_are_equivalent_to_torchs(tmp_path: Path) -> None:
    run_candidates(tmp_path, OWN, timeout_seconds=280)  # compiles them
    baselines = run_baselines(tmp_path, OWN)

    assert {name: compared(baselines[name], tmp_path / name).verdict for name in OWN} == dict.fromkeys(
        OWN, "equivalent"
    )
