"""Every matrix product and convolution returned the product of its inputs, as exactly as its format allows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from traindiff.analyse.findings import Finding
from traindiff.analyse.products import ProductCheck, product_name, row_text
from traindiff.analyse.rules.rule import Contents, Limit, Rule
from traindiff.core.observation import WITNESSED_PRODUCT
from traindiff.core.site import ROOT

ROW = 4.0
"""Largest error of a row that is not a finding, in units of what its format allows.

Right products of float64, float32, float16, bfloat16 and FP8 on the CPU, of random, skewed, positive, constant and
alternating numbers, stay below 1.6 (traindiff explain products), and those of linear layers, with one vector of signs,
below 2.4.
"""

WHOLE = 3.0
"""Largest error of a whole product that is no warning, in the same units. Right products stay below 1.5."""

MOST_ROUNDED = 0.1
"""Largest relative error that is taken for rounding, however short the dtypes are."""

_FITS = 1.5
"""Largest median over the rows with which most rows are right; in units of what the format allows."""

_SHORTEST = 2.0**-8
"""Twice the unit roundoff of bfloat16, the shortest dtype in which libraries add up."""


class ProductsAreRight(Rule):
    """A matrix product or a convolution returned something else than the product of its inputs.

    It is judged if the run has recorded products (`record(observe="products")`): see `traindiff explain products`. With
    `observe="witness"`, what linear layers return is judged in every step, and the gradients of their inputs. A product
    is wrong if a few rows stand out from the others, or if its error is larger than even bfloat16 throughout would
    explain.
    """

    name = "product-wrong"
    finds = "A matrix product or convolution is not the product of its inputs."
    needs = 'matrix products, which record(observe="products") or "witness" records'
    limits: ClassVar[Mapping[str, Limit]] = {
        "row": Limit(
            default=ROW,
            message="how many times the error that its format allows a row may have; right products stay below 2.4",
        ),
    }
    judges_sizes = True

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return bool(contents.products)

    def products(self, checks: Sequence[ProductCheck], *, step: int) -> Iterator[Finding]:
        """Findings of a step: one for each operator of a module, however many ranks and micro-steps share the fault.

        A layer whose operator is found is not named again.
        """
        limit = self.limit("row") / self.strictness
        wrong: dict[tuple[str, ...], list[ProductCheck]] = {}
        for one in checks:
            if is_wrong(one, limit):
                seen = one.seen
                wrong.setdefault((seen.phase, seen.stage, seen.path, one.output), []).append(one)
        several = len({one.rank for one in checks}) > 1
        inside = {(phase, path.rpartition("/")[0]) for phase, stage, path, _ in wrong if stage != WITNESSED_PRODUCT}
        for (phase, stage, path, _), found in wrong.items():
            if stage == WITNESSED_PRODUCT and (phase, path or ROOT) in inside:
                continue
            worst = max(found, key=lambda one: one.residual)
            alone = several and len({one.rank for one in found}) == 1
            yield _finding(worst, step=step, kind="product-wrong", message=_wrong(worst), only_rank=alone)


class ProductsAreExact(Rule):
    """A matrix product or a convolution is less exact than its format allows.

    A kernel may add up in a short dtype, or round its inputs. That may be a choice, so the rule only warns. Products of
    one operator and format are one warning.
    """

    name = "product-inaccurate"
    finds = "A matrix product or convolution is less exact than its format allows."
    needs = 'matrix products, which record(observe="products") or "witness" records'
    judges_sizes = True
    warns = True
    limits: ClassVar[Mapping[str, Limit]] = {
        "error": Limit(
            default=WHOLE,
            message="how many times the error that its format allows a product may have; right products stay below 1.5",
        ),
    }

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return bool(contents.products)

    def begin(self) -> None:
        """Nothing was told so far."""
        self._told: set[tuple[str, str]] = set()

    def products(self, checks: Sequence[ProductCheck], *, step: int) -> Iterator[Finding]:
        """One finding for each operator and format."""
        limit = self.limit("error") / self.strictness
        poor: dict[tuple[str, str], list[ProductCheck]] = {}
        for one in checks:
            inaccurate = one.ratio > limit or one.residual > ROW / self.strictness
            if inaccurate and not one.not_judged and not is_wrong(one, ROW / self.strictness):
                poor.setdefault((one.operator, one.format), []).append(one)
        for key, found in poor.items():
            if key in self._told:
                continue
            self._told.add(key)
            worst = max(found, key=lambda one: one.ratio)
            more = len(found) - 1
            also = f" The same holds for {more} more product{'s' if more > 1 else ''} of this step." if more else ""
            yield _finding(
                worst, step=step, kind="product-inaccurate", message=_inaccurate(worst) + also, num_products=len(found)
            )


def is_wrong(check: ProductCheck, limit: float) -> bool:
    """True if rounding cannot explain a product: some of its rows stand out, or all of it is too far off."""
    if check.not_judged or check.residual <= limit:
        return False
    explained = min(MOST_ROUNDED, _SHORTEST * (1.0 + math.sqrt(check.terms))) if check.terms else MOST_ROUNDED
    return _stands_out(check, limit) or check.error > explained


def _stands_out(check: ProductCheck, limit: float) -> bool:
    """True if most rows are right, and the worst one is far beyond them."""
    return check.median <= _FITS and check.residual > limit * max(1.0, check.median)


def _wrong(check: ProductCheck) -> str:
    where, form = row_text(check.row), f" ({check.format})" if check.format else ""
    far = f"{check.residual:.3g} x as far from it as rounding explains"
    if check.median <= _FITS:
        return (
            f"{product_name(check)} is not {_right(check)} in {where or 'a row'}, where it is {far}{form}. "
            f"Most of its {check.num_rows} rows are right.{_called(check)}"
        )
    return (
        f"{product_name(check)} is not {_right(check)}: its relative error is {check.error:.3g}, and "
        f"rounding explains {check.allowed:.3g}{form}. {where.capitalize()} is {far}.{_called(check)}"
    )


def _right(check: ProductCheck) -> str:
    """What a product should be, in words."""
    if not check.is_of_layer:
        return "the product of its inputs"
    return "the product of its input and weight" if check.seen.phase == "forward" else (
        "the product of the gradient of its output and its weight"
    )  # fmt: skip


def _inaccurate(check: ProductCheck) -> str:
    form = f"{check.format}, " if check.format else ""
    return (
        f"{product_name(check)} is less exact than its format allows ({form}{check.terms} terms): its "
        f"relative error is {check.error:.3g}, and rounding explains {check.allowed:.3g}.{_called(check)}"
    )


def _called(check: ProductCheck) -> str:
    return f" Called from {check.line}" if check.line else ""


def _finding(
    check: ProductCheck, *, step: int, kind: str, message: str, only_rank: bool = False, **evidence: Any
) -> Finding:
    seen = check.seen
    return Finding(
        step=step, micro_step=seen.micro_step, rank=check.rank if only_rank else None, phase=seen.phase,
        stage=seen.stage, path=seen.path, slot=check.output, call=seen.call, order=seen.order, kind=kind,
        message=message,
        evidence={
            "error": check.error, "allowed": check.allowed, "worst_row": check.residual, "median_row": check.median,
            "row": None if check.row is None else list(check.row), "format": check.format, "terms": check.terms,
            "line": check.line, **evidence,
        },
    )  # fmt: skip
