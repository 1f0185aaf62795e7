"""What tests of integrations hold trainings against."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from traindiff.storage import open_recording


def differing(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors that are not the same to the bit."""
    return sorted(
        name
        for name in expected.keys() | found.keys()
        if name not in expected or name not in found or not expected[name].equal(found[name])
    )


def numbers(path: Path) -> list[int]:
    """The steps that a recording has."""
    return [step.step for step in open_recording(str(path)).steps(0)]


def sites(path: Path, *, step: int) -> set[tuple[str, str, str]]:
    """Phase, path and slot of all that a step has numbers of."""
    return {
        (one.phase, one.path, one.slot)
        for found in open_recording(str(path)).steps(0)
        if found.step == step
        for one in found.observations
        if not one.unobserved
    }


def micro_steps(path: Path, *, step: int) -> list[int]:
    """The micro-steps in which `backward` was called."""
    found = [one for one in open_recording(str(path)).steps(0) if one.step == step]
    return [one.micro_step for step_found in found for one in step_found.observations if one.phase == "loss"]
