"""Faults are found, and found where they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import traindiff
from tests.faults.injected import FAULTS
from tests.faults.recipe import recipe, runs_here


def cases() -> Iterator[Any]:
    """Every fault in every precision, of which a release needs all, and a test each fault in one, in turn."""
    for number, (name, fault) in enumerate(FAULTS.items()):
        for position, precision in enumerate(fault.precisions):
            marks = () if position == number % len(fault.precisions) else pytest.mark.release
            yield pytest.param(name, precision, id=f"{name}-{precision}", marks=marks)


@pytest.mark.parametrize(("name", "precision"), list(cases()))
def test_a_fault_is_found_at_its_step_phase_and_site(name: str, precision: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    if not runs_here(fault.model, precision):
        pytest.skip("torch has no such LSTM for this processor")
    baseline = fault.baseline(precision)

    comparison = traindiff.compare(
        baseline.run(tmp_path / "baseline"), fault.change(baseline).run(tmp_path / "candidate")
    )

    first = comparison.first_divergence
    assert first is not None, str(comparison)
    assert comparison.verdict == fault.word
    assert (first.step, first.phase, first.path) == fault.place, str(comparison)
    assert not fault.kind or first.kind == fault.kind, str(comparison)
    assert fault.message in first.message


def test_a_kernel_that_does_not_update_is_found_in_torch_itself(tmp_path: Path) -> None:
    """Fused SGD of torch 2.13 leaves bfloat16 parameters on the CPU as they are."""
    baseline = recipe("conv", "sgd", "bfloat16").but(steps=2)
    broken = baseline.but(
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    )
    if not _fused_sgd_is_broken():
        pytest.skip("this torch updates")

    comparison = traindiff.compare(baseline.run(tmp_path / "baseline"), broken.run(tmp_path / "candidate"))

    first = comparison.first_divergence
    assert first is not None
    assert (first.step, first.phase) == (0, "update")
    assert "never-updated" in {finding.kind for finding in comparison.findings}


def _fused_sgd_is_broken() -> bool:
    parameter = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=0.5, fused=True).step()
    return bool((parameter == 1).all())
