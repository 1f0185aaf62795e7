"""A sample of the zoo, of trainings that other people designed; `make zoo` tries all of it."""

from pathlib import Path

import pytest
from benchmarks.zoo.faults import faults
from benchmarks.zoo.legal import variations
from benchmarks.zoo.measure import ZOO, Bench, outcome

LEGAL = {
    "llama": ("again", "linear-rows", "accumulated-unequal", "fused-projections"),
    "moe": ("linear-columns",),
    "resnet": ("channels-last",),
    "gan": ("again", "linear-rows"),
    "dlrm": ("bag",),
}
FAULTS = {
    "llama": ("norm-eps", "activation", "gradient-doubled", "micro-batch-lost", "learning-rate", "frozen"),
    "moe": ("gradient-row-zero",),
    "resnet": ("evaluation-mode", "bias-lost"),
    "gan": ("gradient-negated",),
    "dlrm": ("low-precision", "stray-write"),
}


@pytest.mark.parametrize("training", LEGAL)
def test_no_legal_variation_is_flagged(training: str, tmp_path: Path) -> None:
    recipe = ZOO[training]
    bench, known = Bench(recipe, tmp_path), variations(recipe)

    for name in LEGAL[training]:
        for mode, found in bench.compare(known[name].change(recipe), ["free"], step=recipe.steps - 1):
            judged = outcome(recipe, name, mode, found, known[name])
            assert judged.right, f"{judged.line()}\n{judged.text}"
            assert judged.verdict == "identical" or not known[name].exact


@pytest.mark.parametrize("training", FAULTS)
def test_faults_are_found_where_they_are_and_named(training: str, tmp_path: Path) -> None:
    known = faults(ZOO[training])

    for name in FAULTS[training]:
        base = known[name].base(ZOO[training])
        for mode, found in Bench(base, tmp_path / name).compare(known[name].change(base), ["free"], step=0):
            judged = outcome(base, name, mode, found, known[name])
            assert (judged.right, judged.located, judged.explained) == (True, True, True), (
                f"{judged.line()}\n{judged.text}"
            )
