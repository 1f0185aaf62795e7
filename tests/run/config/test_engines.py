"""A training under each engine, on two ranks, against the same training on one process."""

from __future__ import annotations

from pathlib import Path

import pytest

import traindiff
from tests.run.config.runs import Case, compared, run_baselines, run_candidates
from traindiff.run.config.setup import Setup

DIVIDED = {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5}

CASES: dict[str, Case] = {
    "ddp": ("blocks", Setup(engine="ddp")),
    "ddp, divided and clipped": ("blocks", Setup(engine="ddp", **DIVIDED)),
    "ddp, fused": ("blocks", Setup(engine="ddp", optimizer="engine")),
    "ddp, scaled": ("blocks", Setup(engine="ddp", loss_scale=64.0)),
    "fsdp1": ("blocks", Setup(engine="fsdp1")),
    "fsdp1, divided and clipped": ("tied", Setup(engine="fsdp1", **DIVIDED)),
    "fsdp1, scaled": ("blocks", Setup(engine="fsdp1", loss_scale=64.0)),
    "fsdp2": ("blocks", Setup(engine="fsdp2")),
    "fsdp2, divided and clipped": ("tied", Setup(engine="fsdp2", **DIVIDED)),
    "fsdp2, fused": ("blocks", Setup(engine="fsdp2", optimizer="engine")),
    "tp": ("blocks", Setup(engine="tp")),
    "tp, divided and clipped": ("tied", Setup(engine="tp", **DIVIDED)),
    "tp, fused": ("blocks", Setup(engine="tp", optimizer="engine")),
    "pp": ("blocks", Setup(engine="pp")),
    "pp, tied and clipped": ("tied", Setup(engine="pp", gradient_clipping=0.5)),
    "pp, traced": ("traced", Setup(engine="pp")),
    **{
        f"{engine} in bfloat16": ("blocks", Setup(engine=engine, dtype="bfloat16", gradient_clipping=0.5))
        for engine in ("ddp", "fsdp1", "fsdp2", "tp", "pp")
    },
    **{f"{engine}, of numbers": ("flat", Setup(engine=engine)) for engine in ("ddp", "fsdp1", "fsdp2", "pp")},
    **{
        f"{engine}, of numbers in bfloat16": ("flat", Setup(engine=engine, dtype="bfloat16"))
        for engine in ("fsdp1", "fsdp2")
    },
    "ddp in float16": ("blocks", Setup(engine="ddp", dtype="float16")),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("engines")
    run_candidates(directory, CASES)
    return directory


@pytest.fixture(scope="module")
def baselines(directory: Path) -> dict[str, Path]:
    return run_baselines(directory, CASES)


@pytest.mark.parametrize("name", CASES)
def test_it_is_equivalent_to_one_process(name: str, directory: Path, baselines: dict[str, Path]) -> None:
    comparison = compared(baselines[name], directory / name)

    assert comparison.verdict == "equivalent", str(comparison)
    assert {row.phase for row in comparison.differences} == {
        "batch", "forward", "loss", "backward", "grad", "optimizer", "update", "param",
    }  # fmt: skip


def test_gradients_were_clipped_where_it_was_asked_for(directory: Path) -> None:
    clipped = {
        name: {
            seen.slot
            for step in traindiff.open_recording(str(directory / name)).steps(0)
            for seen in step.observations
            if seen.stage == "clipped"
        }
        for name in CASES
    }

    assert {name for name, slots in clipped.items() if "max_norm" in slots} == {
        name for name, (_, setup) in CASES.items() if setup.gradient_clipping
    }
