"""`traindiff resume` with trainers that save and load by themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

import traindiff

RECIPES = f"{Path(__file__).parent / 'trainer_recipes.py'}:"


def test_the_trainer_of_transformers_goes_on_exactly(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed; make test-integrations")

    found = traindiff.resume(f"{RECIPES}trainer", tmp_path / "runs", at=3, steps=3)

    assert (found.verdict, found.differences) == ("identical", ()), str(found)
    assert found.comparison.steps == (3, 4, 5)


def test_a_trainer_that_does_not_load_its_optimizer_is_found(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed; make test-integrations")

    found = traindiff.resume(f"{RECIPES}forgetful_trainer", tmp_path / "runs", at=3, steps=3)

    assert found.verdict == "diverged"
    says = [one.message for one in found.differences]
    assert says[0] == "The optimizer has no state (step, exp_avg, exp_avg_sq): it was not loaded."
    assert "The scheduler trainer.lr_scheduler (LambdaLR) is not as it was saved" in " ".join(says)


def test_the_trainer_of_lightning_goes_on_exactly_if_all_batches_are_the_same(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed; make test-integrations")

    found = traindiff.resume(f"{RECIPES}lightning_one_batch", tmp_path / "runs", at=3, steps=3)

    assert (found.verdict, found.differences) == ("identical", ()), str(found)


def test_lightning_begins_the_data_again_within_an_epoch(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed; make test-integrations")

    found = traindiff.resume(f"{RECIPES}lightning", tmp_path / "runs", at=3, steps=3)

    assert found.comparison.first_divergence is not None
    assert found.comparison.first_divergence.message.endswith(
        "Batch 3 of the candidate is the baseline's batch 0: the data begins again."
    )


def test_a_loop_with_accelerate_goes_on_exactly_if_generators_are_restored_last(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed; make test-integrations")

    found = traindiff.resume(f"{RECIPES}accelerate_loop", tmp_path / "runs", at=3, steps=3)

    assert (found.verdict, found.differences) == ("identical", ()), str(found)


def test_accelerate_restores_generators_before_the_loader_draws_from_them(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed; make test-integrations")

    found = traindiff.resume(f"{RECIPES}accelerate_loop_that_draws_after_loading", tmp_path / "runs", at=3, steps=3)

    assert found.verdict == "diverged"
    assert found.comparison.first_divergence is not None
    assert "random state differs before the forward pass" in found.comparison.first_divergence.message


def test_a_scheduler_that_accelerate_was_not_given_is_named(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed; make test-integrations")

    found = traindiff.resume(f"{RECIPES}accelerate_loop_without_scheduler", tmp_path / "runs", at=3, steps=3)

    assert found.verdict == "diverged"
    assert any(one.message.startswith("The scheduler scheduler (StepLR) was not restored") for one in found.differences)
