"""Clipping that one run does: what is said of it, and what of the gradients before it."""

from __future__ import annotations

from pathlib import Path

import pytest

import traindiff
from tests.comparison.test_loss_scale import EVERYTHING, train


def test_clipping_by_default_is_the_first_divergence(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", scaled=False)
    clipped = train(tmp_path / "clipped", scaled=False, clip=0.1)

    comparison = traindiff.compare(plain, clipped)

    first = comparison.first_divergence
    assert first is not None
    assert comparison.verdict == "diverged"
    assert (first.step, first.phase, first.stage, first.slot, first.kind) == (
        0, "grad", "clipped", "max_norm", "clipping",
    )  # fmt: skip
    assert first.says.startswith("The candidate clips gradients to a norm of 0.1; the baseline does not clip.")
    assert first.evidence["coefficient"] == pytest.approx(0.1 / first.evidence["norm"], rel=1e-3)
    assert "(= what clipping makes of them)" in comparison.findings[1].says
    assert not any(comparison.unaligned)


def test_before_clipping_gradients_agree_and_after_it_they_do_not(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", scaled=False, observe=EVERYTHING, steps=1)
    clipped = train(tmp_path / "clipped", scaled=False, clip=0.1, observe=EVERYTHING, steps=1)

    comparison = traindiff.compare(plain, clipped)

    assert [finding.kind for finding in comparison.findings[:2]] == ["clipping", "scale"]
    differing = {row.stage for row in comparison.differences if row.phase == "grad" and row.difference > 0.0}
    equal = {row.stage for row in comparison.differences if row.phase == "grad" and row.difference == 0.0}
    assert "reduced" in equal
    assert "reduced" not in differing


def test_other_limits_are_named(tmp_path: Path) -> None:
    paths = [train(tmp_path / str(limit), scaled=False, clip=limit) for limit in (0.1, 0.05)]

    first = traindiff.compare(*paths).first_divergence

    assert first is not None
    assert first.says == (
        "The baseline clips gradients to a norm of 0.1, the candidate clips gradients to a norm of 0.05."
    )


def test_clipping_that_changes_nothing_is_a_note(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", scaled=False)
    clipped = train(tmp_path / "clipped", scaled=False, clip=1e3)

    comparison = traindiff.compare(plain, clipped)

    assert comparison.verdict == "identical", str(comparison)
    assert "Only the candidate clips gradients to a norm of 1000; that changed nothing." in comparison.notes
