"""Norms and sums: what rounding does to them, and what an error with a direction does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.made_up import Array, Seen, Step, random, record, same, summary_of
from traindiff.analyse.compare import Comparison, compare
from traindiff.analyse.noise.moments import alike

U = 2.0**-8
ROWS, WIDTH = 96, 64


def rounded(values: Any) -> Array:
    """Values of bfloat16, held in float32."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32).astype(np.uint64)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
    return nearest.astype(np.uint32).view(np.float32)


def exactly(site: str, step: int = 0) -> Array:
    """What a tensor would be without rounding."""
    return random(ROWS, WIDTH, seed=hash_of(site) + step) * np.float32(2.0) + np.float32(0.5)


def hash_of(site: str) -> int:
    return sum(map(ord, site))


def of(**factors: Callable[[Array], Any]) -> Callable[[int], Step]:
    """Steps in bfloat16 of modules a, b, c; each may compute something else before it rounds."""

    def build(step: int) -> Step:
        found: Step = {}
        if step == 0:
            found["param", "before", "a.weight", "value"] = Seen(values=random(8, 8, seed=1))
        for path in "abc":
            values = factors.get(path, lambda x: x)(exactly(path, step))
            found["forward", "", path, "output[0]"] = Seen(values=rounded(values), about={"dtype": "bfloat16"})
        loss = factors.get("loss", lambda x: x)(np.array(2.5, dtype=np.float32))
        found["loss", "", "loss", "backward"] = Seen(values=np.asarray(loss, dtype=np.float32))
        for path in "cba":
            values = factors.get(f"{path}_backward", lambda x: x)(exactly(path + "'", step))
            found["backward", "", path, "output[0]"] = Seen(values=rounded(values), about={"dtype": "bfloat16"})
        gradient = factors.get("gradient", lambda x: x)(random(64, 64, seed=5))
        found["grad", "", "a.weight", "grad"] = Seen(values=rounded(gradient), about={"dtype": "bfloat16"})
        weight = factors.get("weight", lambda x: x)(random(8, 8, seed=1) * np.float32(0.9))
        found["param", "", "a.weight", "value"] = Seen(values=np.asarray(weight, dtype=np.float32))
        return found

    return build


def compared(here: Path, steps: int = 1, **factors: Callable[[Array], Any]) -> Comparison:
    paths = [record(here / name, same, steps=steps, build=build) for name, build in (("b", of()), ("c", of(**factors)))]
    return compare(*paths)


def independent(size: float, seed: int) -> Callable[[Array], Any]:
    """Each element moves by itself, before it is rounded."""
    return lambda x: x * (1 + size * U * random(*x.shape, seed=seed))


def by_rows(x: Array) -> Any:
    """Each row's factor was rounded to bfloat16, as a norm that keeps its statistics in that dtype does."""
    return x * rounded(1 + 0.3 * np.abs(random(ROWS, 1, seed=9))) / (1 + 0.3 * np.abs(random(ROWS, 1, seed=9)))


PLACES = {"a": "a", "b": "b", "a_backward": "a", "gradient": "a.weight"}


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("factor", [1 + 0.5 * U, 1 - 0.5 * U, 1 + 0.75 * U])
def test_a_factor_below_one_rounding_moves_the_norm(where: str, factor: float, tmp_path: Path) -> None:
    found = compared(tmp_path, **{where: lambda x: x * factor})

    first = found.first_divergence
    assert first is not None
    assert (found.verdict, first.kind, first.path, len(found.findings)) == ("diverged", "systematic", PLACES[where], 1)
    row = next(one for one in found.differences if one.path == first.path and one.phase == first.phase)
    assert (row.difference, row.floor) == (first.difference, first.floor)
    assert first.difference == pytest.approx(abs(factor - 1), rel=0.2)
    assert first.message.startswith(f"The norm is {first.evidence['factor']:.6g} x the baseline's: ")
    assert first.message.endswith(" x what rounding would change it.")
    assert first.evidence["units"] > 5


def test_a_term_below_one_rounding_moves_the_sum(tmp_path: Path) -> None:
    found = compared(tmp_path, b=lambda x: np.where(np.abs(x) > 1, x + 1.5 * U * np.sign(x - 0.5) * 0 + U, x))

    first = found.first_divergence
    assert first is not None
    assert (first.kind, first.path, first.evidence["statistic"]) == ("systematic", "b", "sum")
    assert "The sum of all elements is " in first.message


def test_a_loss_is_as_exact_as_what_it_averages(tmp_path: Path) -> None:
    """A hundredth is less than two roundings of bfloat16, and far more than the mean of 6,144 of them may be off."""
    found = compared(tmp_path, loss=lambda x: x * 1.005)

    assert found.first_divergence is not None
    assert (found.first_divergence.phase, found.first_divergence.kind) == ("loss", "systematic")


@pytest.mark.parametrize("seed", range(6))
def test_rounding_of_each_element_by_itself_moves_neither(seed: int, tmp_path: Path) -> None:
    places = ("a", "b", "c", "a_backward", "b_backward", "gradient")
    found = compared(
        tmp_path, **{one: independent(0.8, 100 * seed + number) for number, one in enumerate(places)}, loss=lambda x: x
    )

    assert found.verdict == "equivalent", str(found)


def test_a_rounded_factor_of_each_row_is_no_finding(tmp_path: Path) -> None:
    assert compared(tmp_path, b=by_rows).verdict == "equivalent"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_constant_that_is_rounded_in_one_dtype_only_is_no_finding(dtype: str, tmp_path: Path) -> None:
    """Dropout in bfloat16 multiplies by 1 / (1 - p), rounded; in float32 it does not round."""
    factor = rounded(1 / 0.9)

    def build(step: int) -> Step:
        found = of(b=lambda x: x / 0.9)(step)
        if dtype == "float32":
            found["forward", "", "b", "output[0]"] = Seen(values=np.asarray(exactly("b", step) / 0.9, dtype=np.float32))
        return found

    baseline = record(tmp_path / "b", same, steps=1, build=of(b=lambda x: x * factor))
    result = compare(baseline, record(tmp_path / "c", same, steps=1, build=build))

    assert (result.verdict == "equivalent") == (dtype == "float32"), str(result)


def test_what_follows_from_a_moved_norm_is_no_further_finding(tmp_path: Path) -> None:
    found = compared(tmp_path, a=lambda x: x * (1 + U), b=lambda x: x * (1 + 2 * U), c=lambda x: x * (1 - U))

    assert [one.path for one in found.findings] == ["a"]


def test_norms_are_not_judged_where_parameters_differ(tmp_path: Path) -> None:
    """What a weight differs by is the same for all rows."""
    first = compared(tmp_path / "0", 2, weight=lambda x: x * np.float32(1 + 1e-6))
    assert first.findings == ()

    def late(x: Array) -> Any:
        return x * (1 + 0.6 * U) if not np.array_equal(x, exactly("b")) else x

    assert compared(tmp_path / "1", 2, b=late).verdict == "diverged"
    found = compared(tmp_path / "2", 2, b=late, weight=lambda x: x * np.float32(1 + 1e-6))
    assert found.verdict == "equivalent"


def test_a_users_tolerance_counts_alone(tmp_path: Path) -> None:
    paths = [
        record(tmp_path / name, same, steps=1, build=build)
        for name, build in (("b", of()), ("c", of(a=lambda x: x * (1 + U / 2))))
    ]

    assert compare(*paths, rtol=0.01).verdict == "equivalent"


def test_replicas_whose_norms_move_raise_the_floor(tmp_path: Path) -> None:
    build = of(a=lambda x: x * (1 + U / 2))
    base = record(tmp_path / "b", same, steps=1, build=of())
    candidate = record(tmp_path / "c", same, steps=1, build=build)
    noise = [
        record(
            tmp_path / f"n{seed}", same, steps=1, recorded={"replica": f"ulp:{seed}"},
            build=of(a=lambda x, seed=seed: independent(0.5, seed)(x * (1 + U / 3))),
        )
        for seed in (1, 2)
    ]  # fmt: skip

    assert compare(base, candidate).verdict == "diverged"
    assert compare(base, candidate, noise=noise).verdict == "equivalent"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_norms_of_longer_dtypes_are_judged_by_their_elements(dtype: str, tmp_path: Path) -> None:
    def build(factor: float) -> Callable[[int], Step]:
        return lambda step: {("forward", "", "a", "output[0]"): Seen(values=exactly("a").astype(dtype) * factor)}

    size = 16 * 2.0**-24 if dtype == "float32" else 16 * 2.0**-53
    paths = [
        record(tmp_path / str(number), same, steps=1, build=build(np.dtype(dtype).type(factor)))
        for number, factor in enumerate((1.0, 1.0 + size))
    ]

    assert compare(*paths).findings == ()


def test_few_large_elements_scatter_a_norm_as_few_elements_do() -> None:
    plain = random(64, 64, seed=1)
    peaked = plain.copy()
    peaked[:2] *= 30

    assert 200 < alike(summary_of(plain)) < 4096
    assert alike(summary_of(peaked)) < 100
    assert alike(summary_of(np.ones((8, 8), dtype=np.float32))) == pytest.approx(64)
    assert alike(summary_of(np.zeros((8, 8), dtype=np.float32))) == 0.0
