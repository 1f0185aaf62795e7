"""Modes of a training see nothing of what traindiff computes."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import traindiff
from tests.taps.seen_by_modes import MODES
from tests.taps.test_undisturbed import assert_bitwise_equal
from tests.taps.trainings import TRAININGS, Observe
from traindiff.tap_registry import OBSERVABLE


@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_sees_the_same_with_and_without_a_recording(mode: str, name: str, tmp_path: Path) -> None:
    def train(observe: Observe) -> tuple[Any, Any]:
        with MODES[mode]() as seen:
            return TRAININGS[name](observe), seen()

    # To record operators is to put a mode of traindiff's above the training's. Through it, torch calls `detach` on what
    # autograd saves in another way, which DebugMode tells apart.
    observe = OBSERVABLE - {"operators"} if mode == "debugging" else OBSERVABLE
    outcome, seen = train(lambda *_: nullcontext())

    recorded_outcome, recorded_seen = train(
        lambda model, optimizer: traindiff.record(
            tmp_path / "run", model, optimizer, observe=observe, evaluation=True, strict=True
        )
    )

    assert seen or (mode, name) == ("flops", "lstm")  # no formula is known to it
    assert recorded_seen == seen
    assert_bitwise_equal(recorded_outcome, outcome)
