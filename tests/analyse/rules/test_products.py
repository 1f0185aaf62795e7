"""Products of a training that are wrong, or less exact than they could be: named with step, operator, line and row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import traindiff
from tests.made_up import summary_of
from tests.observe.hooks.broken_products import Breaks, one_element
from traindiff.analyse.check import Verdict
from traindiff.analyse.findings import Finding
from traindiff.analyse.products import ProductCheck, product_checks
from traindiff.analyse.rules import RunFacts
from traindiff.analyse.rules.products import ProductsAreExact, ProductsAreRight
from traindiff.core.observation import Observation
from traindiff.core.shards import Shard

WIDTH, SAMPLES = 64, 96


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Conv2d(1, 8, 3, padding=1)
        self.hidden = nn.Linear(8 * WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.images(x.unflatten(1, (1, 8, 8))).relu().flatten(1)
        x = torch.tanh(self.hidden(x))
        return self.out(x)  # type: ignore[no-any-return]


def trained(path: Path, breaks: Breaks | None = None, *, dtype: torch.dtype = torch.float32, **options: Any) -> Verdict:
    """Check three steps of a training, inside a mode that breaks some kernel."""
    torch.manual_seed(0)
    model = Classifier().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    with traindiff.record(path, model, optimizer, observe="products", strict=True):
        for _ in range(3):
            x, y = (
                torch.randn(SAMPLES, WIDTH, generator=generator),
                torch.randint(0, 4, (SAMPLES,), generator=generator),
            )
            with breaks or torch.enable_grad():
                nn.functional.cross_entropy(model(x.to(dtype)), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return traindiff.check(path, **options)


def the(verdict: Verdict, kind: str) -> Finding:
    (found,) = [one for one in (*verdict.findings, *verdict.warnings) if one.kind == kind]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_right_training_is_healthy(dtype: torch.dtype, tmp_path: Path) -> None:
    verdict = trained(tmp_path / "run", dtype=dtype)

    assert (verdict.verdict, verdict.findings, verdict.warnings) == ("healthy", (), ())
    assert verdict.products is not None
    assert len(list(verdict.products)) == 6  # three forward, on lines of their own, and their backward passes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_wrong_element_of_a_product_is_named_with_step_operator_line_and_row(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    verdict = trained(tmp_path / "run", Breaks("aten.addmm", one_element(17, 5), {2}), dtype=dtype)

    found = the(verdict, "product-wrong")
    assert verdict.verdict == "unhealthy"
    assert (found.step, found.phase, found.path, found.slot) == (1, "forward", "hidden/aten.addmm[0]", "output[0]")
    assert found.evidence["row"] == [17]
    assert found.message.startswith("hidden/aten.addmm[0] is not the product of its inputs in row 17, where it is ")
    assert "Most of its 96 rows are right." in found.message
    assert found.message.endswith("x = torch.tanh(self.hidden(x))")
    assert "tests/analyse/rules/test_products.py:" in found.message


def of_convolution(which: int, place: tuple[int, ...]) -> Callable[[tuple[Any, ...], Any], Any]:
    def change(_: tuple[Any, ...], output: Any) -> Any:
        one = output[which] if isinstance(output, tuple) else output
        one[place] += 100.0 * float(one.detach().abs().max())
        return output

    return change


FAULTS: dict[str, tuple[Breaks, tuple[int, str, str, str, list[int]]]] = {
    "gradient of an input": (
        Breaks("aten.mm", one_element(40, 1), {0}), (0, "backward", "out/aten.mm[0]", "output[0]", [40]),
    ),
    "gradient of a weight": (
        Breaks("aten.mm", one_element(3, 7), {9}), (2, "backward", "out/aten.mm[1]", "output[0]", [3]),
    ),
    "a tile": (
        Breaks("aten.addmm", lambda _, output: output.index_fill(0, torch.arange(32, 48), 9.0), {3}),
        (1, "forward", "out/aten.addmm[0]", "output[0]", []),
    ),
    "a convolution": (
        Breaks("aten.convolution", of_convolution(0, (9, 2, 3, 5)), {1}),
        (1, "forward", "images/aten.convolution[0]", "output[0]", [9, 3, 5]),
    ),
    "gradient of a filter": (
        Breaks("aten.convolution_backward", of_convolution(1, (6, 0, 1, 1)), {0}),
        (0, "backward", "images/aten.convolution_backward[0]", "output[1]", [6]),
    ),
    "other inputs": (
        Breaks("aten.addmm", lambda args, _: torch.addmm(args[0], args[1].roll(1, 0), args[2]), {2}),
        (1, "forward", "hidden/aten.addmm[0]", "output[0]", []),
    ),
    "half as large": (
        Breaks("aten.mm", lambda _, output: output * 0.5, {4}), (1, "backward", "out/aten.mm[0]", "output[0]", []),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_each_wrong_product_is_the_only_finding(name: str, tmp_path: Path) -> None:
    breaks, (step, phase, path, slot, row) = FAULTS[name]

    verdict = trained(tmp_path / "run", breaks)

    found = the(verdict, "product-wrong")
    assert (found.step, found.phase, found.path, found.slot) == (step, phase, path, slot)
    assert found.evidence["row"] == row or not row
    assert (len(verdict.findings), verdict.warnings) == (1, ())


def short_sums(args: tuple[Any, ...], _: Tensor) -> Tensor:
    """An `aten.addmm` in bfloat16 whose partial sums are rounded after each term."""
    bias, left, right = (one.float() for one in args[:3])
    total = torch.zeros(left.shape[0], right.shape[1])
    for term in range(left.shape[1]):
        total = (total + left[:, term : term + 1] * right[term : term + 1]).bfloat16().float()
    return (total + bias).bfloat16()


def test_sums_in_a_short_dtype_are_a_warning_that_leaves_the_run_healthy(tmp_path: Path) -> None:
    verdict = trained(tmp_path / "run", Breaks("aten.addmm", short_sums, {0, 2, 4}), dtype=torch.bfloat16)

    found = the(verdict, "product-inaccurate")
    assert verdict.verdict == "healthy"
    assert (found.step, found.path) == (0, "hidden/aten.addmm[0]")
    assert found.evidence["error"] > 2.0 * found.evidence["allowed"]
    assert "less exact than its format allows (bfloat16 x bfloat16 -> bfloat16, 512 terms)" in found.message


def test_one_warning_stands_for_all_products_of_an_operator_and_format(tmp_path: Path) -> None:
    everything = set(range(100))
    verdict = trained(tmp_path / "run", Breaks("aten.mm", lambda _, out: out.bfloat16().float(), everything))

    found = the(verdict, "product-inaccurate")
    assert found.evidence["num_products"] == 4
    assert "The same holds for 3 more products of this step." in found.message
    assert verdict.verdict == "healthy"


def test_rounding_that_the_settings_allow_is_no_warning(tmp_path: Path) -> None:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        verdict = trained(tmp_path / "run", Breaks("aten.mm", lambda _, out: out.bfloat16().float(), set(range(100))))
    finally:
        torch.set_float32_matmul_precision(before)

    assert (verdict.findings, verdict.warnings) == ((), ())
    assert verdict.products is not None
    assert {row.format for row in verdict.products if row.operator == "aten.mm"} == {
        "float32 x float32 -> float32, inputs may be rounded to BF16"
    }


def test_products_of_numbers_that_are_not_finite_are_not_judged(tmp_path: Path) -> None:
    breaks = Breaks("aten.addmm", lambda _, output: torch.full_like(output, torch.nan), {4})

    verdict = trained(tmp_path / "run", breaks, rules="product-wrong,product-inaccurate")

    assert (verdict.findings, verdict.warnings) == ((), ())
    assert any("an input or the output is not finite" in note for note in verdict.notes)


def test_limits_can_be_set(tmp_path: Path) -> None:
    verdict = trained(tmp_path / "run", config={"product-wrong": {"row": 1e-3}, "product-inaccurate": {"error": 1e-3}})

    assert {one.kind for one in (*verdict.findings, *verdict.warnings)} <= {"product-wrong", "product-inaccurate"}
    assert verdict.warnings


def made(**values: Any) -> ProductCheck:
    seen = Observation(
        step=4, micro_step=0, optimizer="optimizer", phase="forward", stage="product", path="fc/aten.mm[0]",
        slot="output[0].residual", call=0, order=1, dtype="float64", shard=Shard.whole((8,)),
    )  # fmt: skip
    about = {
        "rank": 0,
        "operator": "aten.mm",
        "output": "output[0]",
        "terms": 100,
        "format": "f",
        "row": (3,),
        **values,
    }
    return ProductCheck(seen=seen, **about)


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ({"residual": 3.9, "median": 1.0, "error": 1e-3, "allowed": 1e-3}, []),
        ({"residual": 4.1, "median": 0.4, "error": 1e-3, "allowed": 1e-3}, ["product-wrong"]),
        ({"residual": 5.0, "median": 1.4, "error": 1e-3, "allowed": 1e-3}, ["product-inaccurate"]),
        ({"residual": 40.0, "median": 30.0, "error": 3e-2, "allowed": 1e-3}, ["product-inaccurate"]),
        ({"residual": 400.0, "median": 300.0, "error": 0.3, "allowed": 1e-3}, ["product-wrong"]),
        ({"residual": 3.9, "median": 3.5, "error": 3.2e-3, "allowed": 1e-3}, ["product-inaccurate"]),
        ({"residual": 3.9, "median": 3.5, "error": 2.8e-3, "allowed": 1e-3}, []),
        ({"residual": 1e9, "median": 0.4, "error": 9.0, "allowed": 1e-3, "not_judged": "not checked: why"}, []),
    ],
)  # fmt: skip
def test_some_rows_or_a_huge_error_are_wrong_and_a_small_error_in_all_rows_is_inaccurate(
    values: dict[str, Any], kinds: list[str]
) -> None:
    rules = ProductsAreRight(RunFacts()), ProductsAreExact(RunFacts())

    assert [found.kind for rule in rules for found in rule.products([made(**values)], step=4)] == kinds


def test_a_finding_on_one_of_several_ranks_names_the_rank() -> None:
    wrong = {"residual": 50.0, "median": 0.4, "error": 1e-3, "allowed": 1e-3}

    (found,) = ProductsAreRight(RunFacts()).products([made(), made(rank=3, **wrong)], step=4)

    assert found.rank == 3


def test_a_fault_on_all_ranks_is_one_finding() -> None:
    wrong = {"median": 0.4, "error": 1e-3, "allowed": 1e-3}
    checks = [made(residual=50.0, **wrong), made(rank=3, residual=80.0, **wrong)]

    (found,) = ProductsAreRight(RunFacts()).products(checks, step=4)

    assert (found.rank, found.evidence["worst_row"]) == (None, 80.0)


def test_a_product_that_nothing_describes_is_judged_all_the_same() -> None:
    """A writer stops describing operators at 40 MB."""
    seen = made().seen
    numbers = {"residual": np.array([0.5, 90.0, 0.5]), "error": np.array(0.01), "allowed": np.array(1e-3)}
    parts = [
        (seen._replace(slot=f"output[0].{name}", shard=Shard.whole(values.shape)), 0, summary_of(values))
        for name, values in {**numbers, "row": np.array(1.0), "median": np.array(0.5)}.items()
    ]

    (check,) = product_checks(parts, {})
    (found,) = ProductsAreRight(RunFacts()).products([check], step=4)

    assert (check.row, check.line, check.format, check.residual) == ((1,), "", "", 90.0)
    assert found.message == (
        "fc/aten.mm[0] is not the product of its inputs in row 1, where it is 90 x as far from it as rounding "
        "explains. Most of its 3 rows are right."
    )
