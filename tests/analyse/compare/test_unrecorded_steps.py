"""What happens in steps that were not recorded cannot be judged without replicas, and that is said."""

from __future__ import annotations

from pathlib import Path

import pytest

import traindiff
from tests.faults.recipe import Moment, recipe
from tests.faults.rewritten import rewritten

STEPS, EVERY = 23, 20
AFTER = ", which were not recorded or not chosen. After them the parameters differ by "
SAID = f"Not judged: the steps between 0 and 20{AFTER}"
LATE = f"{EVERY}-"
SAID_OF_LATE = f"Not judged: the steps before 20{AFTER}"


def _double(now: Moment) -> None:
    if now.step == 5:
        for parameter in now.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(2.0)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_parameters_that_part_in_steps_that_were_not_recorded_are_told(
    precision: str, optimizer: str, tmp_path: Path
) -> None:
    given = recipe("mlp", optimizer, precision).but(steps=STEPS)  # type: ignore[arg-type]
    baseline = given.run(tmp_path / "baseline", every=EVERY)

    doubled = traindiff.compare(baseline, given.but(after_backward=_double).run(tmp_path / "doubled", every=EVERY))

    told = [note for note in doubled.notes if note.startswith("Not judged")]
    assert len(told) == 1, str(doubled)
    assert told[0].startswith(SAID)


def test_nothing_is_said_if_rounding_explains_it(tmp_path: Path) -> None:
    given = recipe("mlp", "sgd", "float32").but(steps=STEPS)
    baseline = given.run(tmp_path / "baseline", every=EVERY)

    legal = rewritten("mlp")["linear-in-four-parts"](given).run(tmp_path / "legal", every=EVERY)

    comparison = traindiff.compare(baseline, legal)
    assert comparison.verdict == "equivalent", str(comparison)
    assert not [note for note in comparison.notes if note.startswith("Not judged")]


def test_replicas_judge_such_steps(tmp_path: Path) -> None:
    given = recipe("mlp", "sgd", "float32").but(steps=STEPS)
    baseline = given.run(tmp_path / "baseline", every=EVERY)
    replicas = [given.run(tmp_path / str(seed), replica=f"ulp:{seed}", every=EVERY) for seed in (1, 2, 3)]

    doubled = given.but(after_backward=_double).run(tmp_path / "doubled", every=EVERY)

    comparison = traindiff.compare(baseline, doubled, noise=replicas)
    assert comparison.verdict == "diverged", str(comparison)
    assert comparison.first_divergence is not None
    assert comparison.first_divergence.step == EVERY
    assert not [note for note in comparison.notes if note.startswith(SAID)]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_rounding_may_part_runs_before_their_recordings_begin(precision: str, tmp_path: Path) -> None:
    given = recipe("mlp", "adam", precision).but(steps=STEPS)  # type: ignore[arg-type]
    baseline = given.run(tmp_path / "baseline", steps=LATE)

    legal = rewritten("mlp")["linear-transposed"](given).run(tmp_path / "legal", steps=LATE)

    comparison = traindiff.compare(baseline, legal)
    assert comparison.verdict == "equivalent", str(comparison)


def test_a_fault_before_recordings_begin_is_told(tmp_path: Path) -> None:
    given = recipe("mlp", "adam", "float32").but(steps=STEPS)
    baseline = given.run(tmp_path / "baseline", steps=LATE)

    doubled = given.but(after_backward=_double).run(tmp_path / "doubled", steps=LATE)

    comparison = traindiff.compare(baseline, doubled)
    assert any(note.startswith(SAID_OF_LATE) for note in comparison.notes), str(comparison)


def test_runs_of_other_seeds_are_misaligned_however_late_they_are_recorded(tmp_path: Path) -> None:
    given = recipe("mlp", "adam", "float32").but(steps=STEPS)
    baseline = given.run(tmp_path / "baseline", steps=LATE)

    other = given.but(seed=given.seed + 1).run(tmp_path / "other", steps=LATE)

    comparison = traindiff.compare(baseline, other)
    assert comparison.verdict == "misaligned", str(comparison)
    assert comparison.first_divergence is not None
    assert "or did the runs part in the steps before it?" in str(comparison)
    assert not any(note.startswith(SAID_OF_LATE) for note in comparison.notes)


def test_late_replicas_judge_late_recordings(tmp_path: Path) -> None:
    given = recipe("mlp", "sgd", "float32").but(steps=STEPS)
    baseline = given.run(tmp_path / "baseline", steps=LATE)
    replicas = [given.run(tmp_path / str(seed), replica=f"ulp:{seed}", steps=LATE) for seed in (1, 2, 3)]

    legal = rewritten("mlp")["linear-in-four-parts"](given).run(tmp_path / "legal", steps=LATE)
    doubled = given.but(after_backward=_double).run(tmp_path / "doubled", steps=LATE)

    assert traindiff.compare(baseline, legal, noise=replicas).verdict == "equivalent"
    found = traindiff.compare(baseline, doubled, noise=replicas)
    assert found.verdict == "diverged", str(found)
    assert found.first_divergence is not None
    assert found.first_divergence.step == EVERY
