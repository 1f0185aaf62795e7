"""Another loss in a step whose batch could not be compared: that is said, and not that labels may differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.made_up import Seen, Step, random, record
from traindiff.analyse.compare import compare

WHY = "rows of batches of different sizes overlap, so which sample is which is not known"
LOSS = ("loss", "", "loss", "backward")


def with_loss(step: int, sites: Step, *, factor: float = 1.0, unknown: bool = False) -> None:
    sites[LOSS] = Seen(values=factor * random(1, seed=step)[0])
    if unknown and step == 1:
        sites["batch", "", "", "input[0]"] = Seen(values=random(4, 3, seed=step), about={"unobserved": WHY})


@pytest.mark.parametrize("unknown_in", ["baseline", "candidate", "both"])
def test_a_batch_that_could_not_be_compared_is_named(tmp_path: Path, unknown_in: str) -> None:
    def edited(step: int, sites: Step) -> None:
        factor = 1.01 if step == 1 else 1.0
        with_loss(step, sites, factor=factor, unknown=unknown_in in ("candidate", "both"))

    def plain(step: int, sites: Step) -> None:
        with_loss(step, sites, unknown=unknown_in in ("baseline", "both"))

    found = compare(record(tmp_path / "a", plain, steps=3), record(tmp_path / "b", edited, steps=3)).first_divergence

    assert found is not None
    assert (found.step, found.phase) == (1, "loss")
    assert found.message.endswith(
        f"The batch of this step could not be compared: (root) input[0] ({WHY}). Does it hold the same samples?"
    )


def test_nothing_is_said_of_a_batch_that_is_the_same(tmp_path: Path) -> None:
    def edited(step: int, sites: Step) -> None:
        with_loss(step, sites, factor=1.01 if step == 1 else 1.0)

    found = compare(record(tmp_path / "a", with_loss, steps=3), record(tmp_path / "b", edited, steps=3))
    assert found.first_divergence is not None
    assert "The batch" not in found.first_divergence.message
    assert "Labels that only the loss receives are not recorded" in found.first_divergence.message
