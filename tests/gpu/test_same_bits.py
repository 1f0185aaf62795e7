"""A training on a GPU computes the same bits with a recording, and two recordings of it are identical."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import traindiff
from tests.gpu.training import Training, assert_same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")]

EAGER: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16-scaled": {"dtype": torch.float16, "scaler": True},
    "micro-batches": {"num_micro_batches": 4},
    "own-stream": {"stream": True},
}

COMPILED: dict[str, dict[str, Any]] = {
    "inductor": {"compiling": torch.compile},
    "reduce-overhead": {"compiling": lambda model: torch.compile(model, mode="reduce-overhead")},
    "bfloat16": {"compiling": torch.compile, "dtype": torch.bfloat16},
}

WITHOUT_ACTIVATIONS = ("batch", "loss", "grad", "optimizer", "param")


def recorded(path: Path, device: torch.device, how: dict[str, Any], **settings: Any) -> dict[str, torch.Tensor]:
    training = Training(device=device, **how)
    with traindiff.record(path, training.model, training.optimizer, strict=True, **settings):
        return training.run()


@pytest.mark.parametrize("how", EAGER)
def test_a_recording_changes_no_bit_and_two_are_identical(how: str, device: torch.device, tmp_path: Path) -> None:
    plain = Training(device=device, **EAGER[how]).run()

    for name in ("one", "other"):
        assert_same_bits(recorded(tmp_path / name, device, EAGER[how]), plain)

    comparison = traindiff.compare(tmp_path / "one", tmp_path / "other")
    assert comparison.verdict == "identical", str(comparison)
    assert not _unobserved(tmp_path / "one")


@pytest.mark.parametrize("how", COMPILED)
def test_a_recording_without_activations_changes_no_bit_of_compiled_code(
    how: str, device: torch.device, tmp_path: Path
) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)  # or two trainings without a recording differ
    plain = Training(device=device, **COMPILED[how]).run()
    torch.compiler.reset()

    found = recorded(tmp_path / "run", device, COMPILED[how], observe=WITHOUT_ACTIVATIONS)

    assert_same_bits(found, plain)


@pytest.mark.parametrize("how", COMPILED)
def test_compiled_code_is_observed_between_its_cuda_graphs(how: str, device: torch.device, tmp_path: Path) -> None:
    """With `mode="reduce-overhead"` too, the replays of whose graphs would call no hooks."""
    recorded(tmp_path / "run", device, COMPILED[how])

    recording = traindiff.open_recording(str(tmp_path / "run"))
    for step in recording.steps(0):
        outputs = [seen for seen in step.observations if seen.phase == "forward" and seen.path == "blocks.1.up"]
        assert len(outputs) == 1, (step.step, [seen.path for seen in step.observations])
        assert not outputs[0].unobserved


def test_the_kernel_of_the_gpu_summarizes_what_the_one_of_the_cpu_does(device: torch.device, tmp_path: Path) -> None:
    recorded(tmp_path / "device", device, {})
    recorded(tmp_path / "cpu", device, {}, run_on_cpu=True)

    comparison = traindiff.compare(tmp_path / "device", tmp_path / "cpu")

    assert comparison.verdict == "identical", str(comparison)


def _unobserved(path: Path) -> list[str]:
    steps = traindiff.open_recording(str(path)).steps(0)
    return [f"{seen.path}: {seen.unobserved}" for step in steps for seen in step.observations if seen.unobserved]
