"""The checks of matrix products in a step, and the table of all of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from traindiff.analyse.findings import finite
from traindiff.analyse.merge.site import Part
from traindiff.core.observation import (
    ALLOWED,
    ERROR,
    FORMAT,
    MEDIAN,
    RESIDUAL,
    WITNESSED_PRODUCT,
    WORST_ROW,
    Observation,
)
from traindiff.core.site import ROOT
from traindiff.core.summary import finite_count, largest, number
from traindiff.core.witness import CHECKED, elements

_PATH = re.compile(r"(.*)/([^/]+)\[(\d+)\]")

Called = Mapping[int, Mapping[str, Mapping[str, Any]]]
"""What `rank.json` says of operators: by rank, phase and path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductCheck:
    """One product of one step and rank, held against the exact one.

    Attributes:
        seen: The observation of its rows.
        rank: Rank.
        operator: The operator without its number, e.g. `aten.addmm`.
        output: Which output of the operator, e.g. `output[0]`.
        format: Its dtypes; empty if unknown.
        terms: Number of terms of an element; 0 if unknown.
        line: The line that called it: `model.py:12: x = x @ w`; empty if unknown.
        error: Error of the product, relative to its size, or to that of its terms if these cancel.
        allowed: The largest such error that the format explains.
        residual: Error of the worst row, in units of what the format explains.
        row: Index of this row in the shape of the rows: of a layer's, first that of the sample, as a rule, and then its
            position in it; None if unknown.
        num_rows: Number of rows.
        median: Median of these errors over the rows that are not exact.
        not_judged: Why there are no numbers; empty if there are.
    """

    seen: Observation
    rank: int
    operator: str
    output: str
    format: str = ""
    terms: int = 0
    line: str = ""
    error: float = 0.0
    allowed: float = 0.0
    residual: float = 0.0
    row: tuple[int, ...] | None = None
    num_rows: int = 0
    median: float = 0.0
    not_judged: str = ""

    @property
    def is_of_layer(self) -> bool:
        """True if the witness has checked it, and not an operator."""
        return self.seen.stage == WITNESSED_PRODUCT

    @property
    def ratio(self) -> float:
        """Error in units of what the format explains."""
        return self.error / self.allowed if self.allowed else 0.0


_CHECK = "check"
"""End of the slot of the check of a linear layer's product."""

NOT_FINITE = "not checked: an input or the output is not finite"


def product_checks(parts: Iterable[Part], called: Called) -> list[ProductCheck]:
    """The products of a step, in execution order, rank by rank.

    Args:
        parts: Observations of the step with the stages of products.
        called: Descriptions of the operators.
    """
    found: dict[tuple[object, ...], dict[str, tuple[Observation, Any]]] = {}
    for seen, rank, summary in parts:
        output, _, name = seen.slot.rpartition(".")
        key = (rank, seen.evaluation, seen.micro_step, seen.phase, seen.stage, seen.path, seen.call, output)
        found.setdefault(key, {})[name] = (seen, summary)
    made = (_check(values, int(str(key[0])), str(key[-1]), called) for key, values in found.items())
    return sorted((one for one in made if one is not None), key=lambda one: (one.rank, one.seen.order))


def _check(
    values: Mapping[str, tuple[Observation, Any]], rank: int, output: str, called: Called
) -> ProductCheck | None:
    if (layer := values.get(_CHECK)) is not None:
        return _layer_check(*layer, rank, output)
    if RESIDUAL not in values:
        return None
    seen, summary = values[RESIDUAL]
    match = _PATH.fullmatch(seen.path)
    about = called.get(rank, {}).get(seen.phase, {}).get(seen.path, {})
    product = _form(about.get("products", {}).get(output, {}), values.get(FORMAT))
    check = ProductCheck(
        seen=seen, rank=rank, operator=match[2] if match else "", output=output, format=product.get("format", ""),
        terms=product.get("terms", 0), line=_line(about.get("source")), not_judged=seen.unobserved,
    )  # fmt: skip
    if seen.unobserved:
        return check
    if not finite_count(summary):
        return replace(check, not_judged=NOT_FINITE)
    numbers = {name: number(one) for name, (_, one) in values.items() if name != RESIDUAL}
    return replace(
        check, residual=float(largest(summary)), error=numbers.get(ERROR, 0.0), allowed=numbers.get(ALLOWED, 0.0),
        median=numbers.get(MEDIAN, 0.0), row=_index(numbers.get(WORST_ROW), seen.shard.shape),
        num_rows=math.prod(seen.shard.shape),
    )  # fmt: skip


def _form(product: Mapping[str, Any], chosen: tuple[Observation, Any] | None) -> Mapping[str, Any]:
    """The format and the number of terms of a call; it chooses one if calls of this operator differ in them."""
    if chosen is None:
        return product
    others, place = product.get("others", ()), number(chosen[1])
    return others[int(place) - 1] if 1 <= place <= len(others) else {}


def _layer_check(seen: Observation, summary: Any, rank: int, output: str) -> ProductCheck:
    """The check of a product of a linear layer, from its vector."""
    numbers = dict(zip(CHECKED, elements(summary).tolist(), strict=True))
    known = all(map(math.isfinite, numbers.values()))
    rows, positions = (int(numbers[name]) if known else 0 for name in ("rows", "positions"))
    shape = (rows,) if positions <= 1 else (rows // positions, positions)
    return ProductCheck(
        seen=seen, rank=rank, operator="", output=output, terms=int(numbers["terms"]) if known else 0,
        error=numbers["error"], allowed=numbers["allowed"], residual=numbers["residual"], median=numbers["median"],
        row=_index(numbers["row"], shape) if known else None, num_rows=rows, not_judged="" if known else NOT_FINITE,
    )  # fmt: skip


def _index(place: float | None, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The index at a place of an array in row-major order; None if there is none."""
    if place is None or not 0 <= place < math.prod(shape):
        return None
    rest, index = int(place), []
    for size in reversed(shape):
        rest, one = divmod(rest, size)
        index.append(one)
    return tuple(reversed(index))


def _line(source: Mapping[str, Any] | None) -> str:
    if not source:
        return ""
    code = f": {source['code']}" if source.get("code") else ""
    return f"{source.get('file', '')}:{source.get('line')}{code}"


def product_name(check: ProductCheck) -> str:
    """A product as the subject of a sentence: its path, and its output if the operator has several."""
    if check.is_of_layer:
        of = "The output" if check.seen.phase == "forward" else "The gradient of the input"
        return f"{of} of {check.seen.path or ROOT}"
    return check.seen.path if check.output == "output[0]" else f"{check.seen.path} {check.output}"


def row_text(row: tuple[int, ...] | None) -> str:
    """A row in readable form: `row 17`, `row (3, 17)`; empty if unknown."""
    if not row:
        return ""
    return f"row {row[0]}" if len(row) == 1 else f"row ({', '.join(map(str, row))})"


PRODUCT_COLUMNS = (
    "phase", "operator", "called from", "format", "terms", "products", "error", "allowed", "x allowed", "worst row",
)  # fmt: skip
"""Columns of the table of products for people."""


@dataclass(slots=True, kw_only=True)
class ProductRow:
    """The products of one operator that one line calls, in one format.

    Attributes:
        phase: `forward` or `backward`.
        operator: The operator, e.g. `aten.addmm`.
        output: Which output of it.
        line: The line that called it, or in the backward pass the one that called the operator of the forward pass.
        format: Dtypes.
        terms: Number of terms of an element, at most.
        num_products: Number of products.
        error: Error of the one that is furthest from what its format allows, relative to its size.
        allowed: The error that its format allows.
        ratio: Their ratio.
        residual: Error of the worst row of all, in units of what its format allows.
        path: The path of the product with this row.
        step: Its step.
        row: Index of the row.
    """

    phase: str
    operator: str
    output: str
    line: str
    format: str
    terms: int = 0
    num_products: int = 0
    error: float = 0.0
    allowed: float = 0.0
    ratio: float = 0.0
    residual: float = 0.0
    path: str = ""
    step: int = 0
    row: tuple[int, ...] | None = None

    def add(self, check: ProductCheck) -> None:
        """Count a product."""
        first = not self.num_products
        self.num_products += 1
        self.terms = max(self.terms, check.terms)
        if first or check.ratio > self.ratio:
            self.error, self.allowed, self.ratio = check.error, check.allowed, check.ratio
        if first or check.residual > self.residual:
            self.residual, self.path, self.row, self.step = check.residual, check.seen.path, check.row, check.seen.step

    @property
    def cells(self) -> tuple[str, ...]:
        """The row for people, by `PRODUCT_COLUMNS`."""
        operator = self.operator if self.output == "output[0]" else f"{self.operator} {self.output}"
        where = f"{self.residual:.2g} x in {row_text(self.row) or 'a row'} of {self.path}, step {self.step}"
        return (
            self.phase, operator, self.line, self.format, str(self.terms), str(self.num_products),
            f"{self.error:.2g}", f"{self.allowed:.2g}", f"{self.ratio:.2g}", where,
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """The row in the schema of `--json`."""
        return {
            "phase": self.phase, "operator": self.operator, "output": self.output, "line": self.line,
            "format": self.format, "terms": self.terms, "num_products": self.num_products,
            "error": finite(self.error), "allowed": finite(self.allowed), "ratio": finite(self.ratio),
            "worst_row": finite(self.residual), "path": self.path, "step": self.step,
            "row": None if self.row is None else list(self.row),
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class UncheckedProducts:
    """Calls of one operator whose products were not checked.

    Attributes:
        operator: The operator; empty for a whole module.
        reason: Why they were not checked.
        path: Path of the first.
        count: Number of calls.
    """

    operator: str
    reason: str
    path: str
    count: int

    def to_json(self) -> dict[str, Any]:
        """The calls in the schema of `--json`."""
        return {"operator": self.operator, "reason": self.reason, "path": self.path, "count": self.count}

    def __str__(self) -> str:
        if not self.operator:
            return f"{self.path or ROOT}: {self.reason}"
        return f"{self.operator} ({self.count} {'call' if self.count == 1 else 'calls'}): {self.reason}"


@dataclass(slots=True)
class ProductTable:
    """The products of a run by operator and line, in the order in which each was first seen."""

    _rows: dict[tuple[str, str, str, str, str], ProductRow] = field(default_factory=dict)
    _unchecked: dict[tuple[str, str, str], tuple[str, int]] = field(default_factory=dict)

    def add(self, checks: Iterable[ProductCheck]) -> None:
        """Add the products of a step that are operators."""
        for check in checks:
            if check.is_of_layer:
                continue
            if check.not_judged:
                key = check.operator, "" if check.operator else check.seen.path, check.not_judged
                path, count = self._unchecked.get(key, (check.seen.path, 0))
                self._unchecked[key] = path, count + 1
                continue
            which = check.seen.phase, check.operator, check.output, check.line, check.format
            row = self._rows.get(which)
            if row is None:
                phase, operator, output, line, form = which
                row = self._rows[which] = ProductRow(
                    phase=phase, operator=operator, output=output, line=line, format=form
                )
            row.add(check)

    def __iter__(self) -> Iterator[ProductRow]:
        return iter(self._rows.values())

    @property
    def unchecked(self) -> list[UncheckedProducts]:
        """The operators whose products were not checked."""
        return [
            UncheckedProducts(operator=operator, reason=reason.removeprefix("not checked: "), path=path, count=count)
            for (operator, _, reason), (path, count) in self._unchecked.items()
        ]

    def notes(self) -> list[str]:
        """Sentences about what was checked, and what was not."""
        count = sum(row.num_products for row in self)
        return [
            f"{count} matrix products and convolutions were checked: traindiff check --products lists their errors.",
            *(f"Not checked: {one}." for one in self.unchecked),
        ]

    def to_json(self) -> dict[str, Any]:
        """The table in the schema of `--json`."""
        return {"rows": [row.to_json() for row in self], "not_checked": [one.to_json() for one in self.unchecked]}
