"""Training is bitwise the same with and without a recording."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

import traindiff
from tests.observe.hooks.reading import rows
from tests.observe.hooks.trainings import TRAININGS, Outcome
from traindiff.core.tap_registry import OBSERVABLE


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_bitwise_equal(actual: Outcome, expected: Outcome) -> None:
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert actual[name].shape == tensor.shape, name
        assert bits(actual[name]) == bits(tensor), name


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_computes_the_same_bits_with_and_without_a_recording(name: str, tmp_path: Path) -> None:
    expected = TRAININGS[name](lambda *_: nullcontext())

    actual = TRAININGS[name](
        lambda model, optimizer: traindiff.record(
            tmp_path / "run", model, optimizer, observe=OBSERVABLE, evaluation=True, strict=True
        )
    )

    assert_bitwise_equal(actual, expected)
    assert len({seen.step for seen, _ in rows(tmp_path / "run")}) >= 3


def test_the_trainings_would_notice_a_disturbance() -> None:
    """The comparison above is worth something: one more random number drawn, and it fails."""
    expected = TRAININGS["dropout"](lambda *_: nullcontext())

    def disturb(*_: object) -> nullcontext[None]:
        torch.rand(1)
        return nullcontext()

    with pytest.raises(AssertionError):
        assert_bitwise_equal(TRAININGS["dropout"](disturb), expected)
