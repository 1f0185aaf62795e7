"""A sample of the faults and legal variations of tests/faults, on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import traindiff
from tests.faults.injected import FAULTS
from tests.faults.recipe import Moment, Recipe, recipe
from traindiff.core.tap_registry import OBSERVED_BY_DEFAULT

pytestmark = pytest.mark.gpu

SAMPLE = (
    "gradient-doubled", "sign-flipped", "one-row-corrupted", "gradient-lost", "zero-grad-missing", "labels-shifted",
    "layer-norm-eps", "not-a-number", "never-updated", "beta2",
)  # fmt: skip


def on(device: torch.device, given: Recipe) -> Recipe:
    """The same training on a device."""
    return given.but(
        build=lambda: given.build().to(device), batch=lambda data: tuple(one.to(device) for one in given.batch(data))
    )


@pytest.mark.parametrize("name", SAMPLE)
def test_a_fault_is_found_at_its_step_phase_and_site(name: str, device: torch.device, tmp_path: Path) -> None:
    fault = FAULTS[name]
    baseline = on(device, fault.baseline("float32"))

    comparison = traindiff.compare(
        baseline.run(tmp_path / "baseline"), fault.change(baseline).run(tmp_path / "candidate")
    )

    first = comparison.first_divergence
    assert first is not None, str(comparison)
    assert (first.step, first.phase, first.path) == fault.place, str(comparison)


@pytest.mark.parametrize("model", ["gpt", "conv", "lstm"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_gpu_and_a_cpu_train_the_same(
    model: str, precision: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = recipe(model, "adam", precision).but(steps=4)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # which a CPU does not have

    comparison = traindiff.compare(given.run(tmp_path / "cpu"), on(device, given).run(tmp_path / "gpu"))

    assert comparison.first_divergence is None, str(comparison)


def test_a_bit_that_flips_in_a_gradient_is_found_without_a_baseline(device: torch.device, tmp_path: Path) -> None:
    """As faulty hardware would flip it; the gradient no longer is what the layer's input and output gradient give."""
    flipped, step = "h.1.mlp.fc.weight", 2

    def flip(now: Moment) -> None:
        if now.step == step:
            gradient = now.model.get_parameter(flipped).grad
            assert gradient is not None
            place = gradient.abs().argmax()
            gradient.view(torch.int32).view(-1)[place] ^= 1 << 24  # 4 or 1/4 of the largest element

    given = on(device, recipe("gpt").but(steps=4))
    observe = (*OBSERVED_BY_DEFAULT, "witness", "replay")

    healthy = traindiff.check(given.run(tmp_path / "healthy", observe=observe))
    found = traindiff.check(given.but(after_backward=flip).run(tmp_path / "flipped", observe=observe))

    assert healthy.verdict == "healthy", str(healthy)
    assert found.findings, str(found)
    assert (found.findings[0].step, found.findings[0].path) == (step, flipped), str(found)


def test_micro_batches_are_the_same_training(device: torch.device, tmp_path: Path) -> None:
    given = on(device, recipe("gpt").but(steps=4))

    comparison = traindiff.compare(
        given.run(tmp_path / "one"), given.but(micro_batches=(2, 2, 4)).run(tmp_path / "several")
    )

    assert comparison.verdict == "equivalent", str(comparison)
