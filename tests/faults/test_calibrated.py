"""With measured floors: faults are found where they are, free and forced, and legal variations are not flagged.

A part of benchmarks/faults.py, with every kind of model, phase and precision in it.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.faults.further_faults import FURTHER_FAULTS
from tests.faults.injected import FAULTS
from tests.faults.laboratory import STEPS, Laboratory
from tests.faults.recipe import recipe
from tests.faults.rewritten import REPRESENTATION, rewritten
from tests.faults.variations import variations

release = partial(pytest.param, marks=pytest.mark.release)

FOUND = [
    ("gradient-doubled", "float32"),
    release("gradient-noise", "float32"),
    release("softmax-in-bfloat16", "float32"),
    release("bit-flipped-in-mantissa", "float32"),
    ("batch-norm-eps", "float32"),
    ("last-but-one-state", "float32"),
    release("mask-lets-one-through", "bfloat16"),
    release("norm-variance-detached", "bfloat16"),
    ("one-token-untrained", "bfloat16"),
    release("padding-reflects", "bfloat16"),
    ("residual-lost", "autocast"),
]
NOT_FLAGGED = [
    release("gpt", "adamw", "float32", "accumulated-8"),
    release("gpt", "adamw", "float32", "softmax-online"),
    ("gpt", "adamw", "float32", "fused-projections"),
    ("conv", "sgd", "float32", "channels-last"),
    release("conv", "sgd", "float32", "batch-norm-by-hand"),
    ("lstm", "adam", "float32", "unrolled"),
    release("gpt", "adamw", "bfloat16", "accumulated-2"),
    ("gpt", "adamw", "bfloat16", "layer-norm-as-group-norm"),
    release("conv", "sgd", "bfloat16", "convolution-unfolded"),
    ("gpt", "adamw", "autocast", "linear-einsum"),
]


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    return Laboratory(tmp_path_factory.mktemp("laboratory"))


@pytest.mark.parametrize(("name", "precision"), FOUND, ids=lambda value: value)
def test_a_fault_is_found_where_it_is_free_and_forced(name: str, precision: str, laboratory: Laboratory) -> None:
    fault = {**FAULTS, **FURTHER_FAULTS}[name]
    baseline = fault.baseline(precision)
    candidate = fault.change(baseline)

    free = laboratory.free(baseline, candidate)
    forced = laboratory.forced(baseline, candidate, step=fault.step)

    for comparison in (free, forced):
        first = comparison.first_divergence
        assert comparison.calibrated
        assert first is not None, str(comparison)
        assert (comparison.verdict, (first.step, first.phase, first.path)) == (fault.word, fault.place), str(comparison)


@pytest.mark.parametrize(("model", "optimizer", "precision", "name"), NOT_FLAGGED, ids=lambda value: value)
def test_a_legal_variation_is_not_flagged_free_or_forced(
    model: str, optimizer: str, precision: str, name: str, laboratory: Laboratory
) -> None:
    baseline = recipe(model, optimizer, precision).but(steps=6)  # type: ignore[arg-type]
    candidate = {**variations(model, optimizer, precision), **rewritten(model)}[name](baseline)

    for comparison in (
        laboratory.free(baseline, candidate),
        laboratory.forced(baseline, candidate, step=STEPS - 1),
    ):
        assert comparison.verdict in ("identical", "equivalent"), str(comparison)
        assert not any(comparison.unaligned)


def test_a_bfloat16_fault_below_its_rounding_shows_when_computed_in_float32(laboratory: Laboratory) -> None:
    fault = FAULTS["layer-norm-eps"]
    baseline = fault.baseline("bfloat16")
    candidate = fault.change(baseline)

    natively = laboratory.forced(baseline, candidate, step=fault.step)
    widened = laboratory.forced(baseline, candidate, step=fault.step, precision=torch.float32)

    assert not natively.findings
    first = widened.first_divergence
    assert first is not None
    assert (first.phase, first.path) == (fault.phase, fault.path)
    assert first.difference < 2**-8


@pytest.mark.parametrize("model", ["gpt", "conv"])
@pytest.mark.parametrize("name", ["batch-permuted", "channels-permuted"])
def test_another_order_of_samples_or_channels_is_another_representation(
    model: str, name: str, laboratory: Laboratory
) -> None:
    baseline = recipe(model, "adamw" if model == "gpt" else "sgd").but(steps=6)
    comparison = laboratory.free(baseline, REPRESENTATION[model][name](baseline))

    assert comparison.verdict == "equivalent", str(comparison)
    assert comparison.representation


def test_the_same_training_forced_is_identical_with_batch_statistics(laboratory: Laboratory, tmp_path: Path) -> None:
    baseline = recipe("conv", "sgd").but(steps=6)

    assert laboratory.forced(baseline, baseline, step=STEPS - 1).verdict == "identical"
