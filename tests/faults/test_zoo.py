"""A sample of the zoo, of trainings that other people designed; `make zoo` tries all of it."""

from pathlib import Path

import pytest
from benchmarks.products import exactness
from benchmarks.zoo.faults import faults
from benchmarks.zoo.legal import variations
from benchmarks.zoo.measure import ZOO, Bench, outcome

LEGAL = {
    ("llama", "float32"): ("again", "linear-rows", "accumulated-unequal", "fused-projections"),
    ("moe", "float32"): ("linear-columns",),
    ("moe", "bfloat16"): ("fused-projections",),
    ("resnet", "float32"): ("channels-last",),
    ("gan", "float32"): ("again", "linear-rows"),
    ("gan", "autocast"): ("linear-columns", "linear-einsum"),
    ("dlrm", "float32"): ("bag",),
    ("t5", "bfloat16"): ("permuted-batch",),
    ("bert", "autocast"): ("threads",),
    ("sam", "autocast"): ("linear-columns", "linear-einsum"),
}
FAULTS = {
    ("llama", "float32"): ("norm-eps", "activation", "gradient-doubled", "micro-batch-lost", "learning-rate", "frozen"),
    ("llama", "bfloat16"): ("gradient-doubled", "stale-gradient"),
    ("moe", "float32"): ("gradient-row-zero",),
    ("resnet", "float32"): ("evaluation-mode", "bias-lost"),
    ("gan", "float32"): ("gradient-negated", "stray-write"),
    ("dlrm", "float32"): ("low-precision", "stray-write"),
    ("sam", "float32"): ("stale-gradient",),
}


@pytest.mark.parametrize(("training", "precision"), LEGAL)
def test_no_legal_variation_is_flagged(training: str, precision: str, tmp_path: Path) -> None:
    recipe = ZOO[training].but(precision=precision)
    bench, known = Bench(recipe, tmp_path), variations(recipe)

    for name in LEGAL[training, precision]:
        for mode, found in bench.compare(known[name].change(recipe), ["free"], step=recipe.steps - 1):
            judged = outcome(recipe, name, mode, found, known[name])
            assert judged.right, f"{judged.line()}\n{judged.text}"
            assert judged.verdict == "identical" or not known[name].exact


@pytest.mark.parametrize(("training", "precision"), FAULTS)
def test_faults_are_found_where_they_are_and_named(training: str, precision: str, tmp_path: Path) -> None:
    recipe = ZOO[training].but(precision=precision)
    known = faults(recipe)

    for name in FAULTS[training, precision]:
        base = known[name].base(recipe)
        for mode, found in Bench(base, tmp_path / name).compare(known[name].change(base), ["free"], step=0):
            judged = outcome(base, name, mode, found, known[name])
            assert (judged.right, judged.located, judged.explained) == (True, True, True), (
                f"{judged.line()}\n{judged.text}"
            )


@pytest.mark.parametrize("training", ["moe", "resnet", "gru", "lbfgs"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
def test_the_products_of_right_trainings_are_as_exact_as_their_formats_allow(training: str, precision: str) -> None:
    found = exactness(ZOO[training].but(precision=precision))

    assert found.num_products > 50
    assert (found.findings, found.same_bits) == ((), True)
    assert (found.whole < 1.5, found.row < 2.0) == (True, True)


def test_forced_steps_of_several_optimizers_include_all_of_them(tmp_path: Path) -> None:
    recipe = ZOO["gan"]
    lost = faults(recipe)["branch-detached"]  # of the generator, whose optimizer steps last

    (forced,) = Bench(recipe, tmp_path / "fault").compare(lost.change(recipe), ["forced"], step=0)
    (right,) = Bench(recipe, tmp_path / "again").compare(recipe, ["forced"], step=2)

    found = outcome(recipe, "branch-detached", *forced, lost)
    assert (found.right, found.located, found.explained) == (True, True, True), found.text
    assert outcome(recipe, "again", *right, variations(recipe)["again"]).verdict == "identical"
