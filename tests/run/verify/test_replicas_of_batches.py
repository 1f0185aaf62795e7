"""Which replicas measure a baseline's noise: one more if its model takes statistics of batches."""

from __future__ import annotations

from pathlib import Path

import pytest

import traindiff
from tests.faults.recipe import recipe


@pytest.mark.parametrize(
    ("model", "asked", "made"),
    [
        ("conv", {}, ["ulp-1", "ulp-2", "reorder-1", "channel-1"]),
        ("lstm", {}, ["ulp-1", "ulp-2", "reorder-1"]),
        ("conv", {"replicas": ("ulp:1",)}, ["ulp-1"]),
    ],
)
def test_a_model_with_batch_norm_gets_the_replica_of_channels(
    model: str, asked: dict[str, tuple[str, ...]], made: list[str], tmp_path: Path
) -> None:
    training = recipe(model, "sgd" if model == "conv" else "adam", "float32")  # type: ignore[arg-type]

    _, noise = traindiff.calibrate(training, tmp_path, steps=1, repeat=False, **asked)

    assert [Path(one).name for one in noise] == made
