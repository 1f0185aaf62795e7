"""Legal trainings of other people's design break none of the rules that look for single mistakes of users."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.zoo.legal import variations
from benchmarks.zoo.measure import ZOO
from benchmarks.zoo.recipe import Recipe

import traindiff
from tests.analyse.rules.small_trainings import kinds
from traindiff.core.tap_registry import OBSERVED_BY_DEFAULT

RULES = frozenset(
    {
        "constant-output", "frozen-stages", "idle-optimizer", "lost-contribution", "missed-by-autocast",
        "no-spectral-norm", "random-evaluation", "repeated-batch", "single-sample-input", "stopped",
        "trained-in-evaluation-mode", "zero-batch",
    }
)  # fmt: skip

STEPS = 12

SAMPLE = (
    ("llama", "float32"), ("moe", "autocast"), ("lora", "bfloat16"), ("gru", "float32"), ("vae", "autocast"),
    ("unet", "float32"), ("dlrm", "bfloat16"), ("gan", "float32"), ("sam", "float32"), ("lbfgs", "float32"),
    ("actor-critic", "float32"),
)  # fmt: skip


def checked(recipe: Recipe, path: Path) -> set[str]:
    """Kinds of all findings and warnings about a training of the zoo, with everything recorded that rules can use."""
    training = recipe()
    settings = {"evaluation": True, **training.record, "observe": [*OBSERVED_BY_DEFAULT, "grad.micro"]}
    with traindiff.record(path, training.model, training.optimizer, strict=True, **settings):
        for batch in training.batches:
            training.step(batch)
    return kinds(traindiff.check(path))


@pytest.mark.parametrize(("name", "precision"), SAMPLE)
def test_a_training_of_the_zoo_breaks_none_of_these_rules(name: str, precision: str, tmp_path: Path) -> None:
    recipe = ZOO[name].but(precision=precision, steps=STEPS)

    assert not checked(recipe, tmp_path / "run") & RULES


@pytest.mark.parametrize(
    ("name", "variation"),
    [("llama", "accumulated-unequal"), ("resnet", "batch-norm"), ("bert", "checkpointed")],
)
def test_a_legal_variation_breaks_none_either(name: str, variation: str, tmp_path: Path) -> None:
    recipe = ZOO[name]

    assert not checked(variations(recipe)[variation].change(recipe).but(steps=STEPS), tmp_path / "run") & RULES
