"""Check, row by row, the two other products of a linear layer: its output, and the gradient of its input.

    y·a = x·(Wᵀa) + bias·a        dx·b = g·(W b)

One vector of random signs is enough to see one wrong element of a row, whatever its place: a sign changes no size. Sums
are in float64, so only the rounding of the product itself is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.parametrize import is_parametrized

from traindiff.core.kernels.row_sums import row_sums, table_sums
from traindiff.observe.torch.products.rounding import Format, Rows, RowSizes, allowed
from traindiff.observe.torch.witness.graph import RESHAPES, kind_of

_SEED = 0x50524F44

_PLACES = {"AddmmBackward": 1, "MmBackward": 0}
"""Number of the input of a linear layer among those of the node of its product."""


@lru_cache(maxsize=4096)
def _signs(count: int, device: torch.device) -> Tensor:
    """Random signs, float64: always the same ones."""
    generator = torch.Generator().manual_seed(_SEED + count)
    drawn = torch.randint(0, 2, (count,), generator=generator)
    return (2.0 * drawn.to(torch.float64) - 1.0).to(device)


@lru_cache(maxsize=4096)
def _ones(count: int, device: torch.device) -> Tensor:
    return torch.ones(count, dtype=torch.float64, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """The weight of a linear layer in one call, multiplied by signs.

    Attributes:
        shape: Number of outputs and of inputs.
        dtype: In which the product is computed: autocast converts weights.
        by_input: float64, shape (2, inputs): `Wᵀa`, and the squared norms of the weight's columns.
        by_output: float64, shape (2, outputs): `W b`, and the squared norms of its rows.
        largest: Norm of the weight.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    by_input: Tensor
    by_output: Tensor
    largest: Tensor


def factor_of(weight: Tensor, dtype: torch.dtype) -> Factor:
    """A weight, shape (outputs, inputs), as a product in a dtype uses it."""
    values = weight.detach().to(dtype)
    outputs, inputs = values.shape
    by_input, by_output = table_sums(values, _signs(outputs, values.device), _signs(inputs, values.device))
    return Factor(
        shape=(outputs, inputs), dtype=dtype, by_input=by_input, by_output=by_output, largest=by_output[1].sum().sqrt()
    )


def check_output(factor: Factor, given: Tensor, bias: Tensor | None, output: Tensor) -> Tensor:
    """The check of what a linear layer returned; see `_checked`."""
    signs = _signs(factor.shape[0], output.device)
    sums = None
    if bias is not None:
        values = bias.detach().to(factor.dtype).double()
        sums = torch.stack([values @ signs, values.norm()])
    return _checked(
        given.detach().to(factor.dtype), factor, factor.by_input, output.detach(), signs, sums, output.shape[:-1]
    )


def check_gradient(factor: Factor, gradient: Tensor, of_input: Tensor, rows: Sequence[int]) -> Tensor:
    """The check of the gradient of its input, given that of its output, and the shape of its rows; see `_checked`."""
    signs = _signs(factor.shape[1], of_input.device)
    return _checked(gradient.detach(), factor, factor.by_output, of_input.detach(), signs, None, rows)


def _checked(
    left: Tensor, factor: Factor, right: Tensor, found: Tensor, signs: Tensor, added: Tensor | None,
    rows: Sequence[int],
) -> Tensor:  # fmt: skip
    """How far a product is from the exact one.

    Args:
        left: What is multiplied by the weight; its last axis is summed.
        factor: The weight.
        right: Its products with signs, and the squares of its rows or columns.
        found: The product.
        signs: Of its columns.
        added: Sum of what is added to each row, times signs, and its norm; None for nothing.
        rows: Shape of the rows as the layer was given them.

    Returns:
        float64, shape (8,), as `traindiff.core.witness` says, without synchronizing.
    """
    form = _format(left.dtype, factor.dtype, found.dtype, found.device.type)
    sums = row_sums(left.reshape(-1, left.shape[-1]), right[0], right[1])
    made = row_sums(found.reshape(-1, found.shape[-1]), signs, _ones(signs.numel(), signs.device))
    counts = left.shape[-1], made.shape[1], prod(rows[1:])
    own = (0.0, 0.0) if added is None else added
    if not _in_memory(found):
        with_zero = own if added is not None else torch.zeros(2, dtype=torch.float64, device=found.device)
        numbers = _numbers(torch, form, sums, made, with_zero, factor.largest, signs.numel(), counts[0])
        return torch.stack([
            *numbers, *torch.tensor(counts, dtype=torch.float64, device=found.device).unbind()
        ]).nan_to_num(nan=0.0)  # fmt: skip
    with np.errstate(all="ignore"):
        numbers = _numbers(
            np, form, sums.numpy(), made.numpy(), np.asarray(own), factor.largest.numpy(), signs.numel(), counts[0]
        )
    return torch.tensor([*map(float, numbers), *counts], dtype=torch.float64, device="cpu").nan_to_num_(nan=0.0)


def _in_memory(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _numbers(
    library: Any, form: Format, sums: Rows, made: Rows, added: Rows, largest: Rows, num_columns: int, num_terms: int
) -> list[Any]:
    """The first five numbers of a check, computed by NumPy or torch."""
    terms, result = sums[1] ** 0.5, made[1] ** 0.5
    partial = library.maximum(sums[2] ** 0.5, library.maximum(terms, result))
    sizes = RowSizes(
        result=result, added=added[1], terms=terms, partial=partial, num_columns=num_columns, num_terms=num_terms
    )
    errors, bounds = abs(made[0] - (sums[0] + added[0])), allowed(form, sizes, largest)
    ratios = errors / bounds
    known = library.isfinite(ratios)
    ratios = library.where(known, ratios, 0.0)
    size = library.maximum(*(_norm(library.where(known, one, 0.0)) for one in (terms, result)))
    error, bound = (_norm(library.where(known, one, 0.0)) / size for one in (errors, bounds))
    return [ratios.max(), ratios.argmax(), _median(ratios), error, bound]


def _median(ratios: Any) -> Any:
    """Median of those that are not 0; 0, or NaN, if all are."""
    if isinstance(ratios, Tensor):
        return torch.where(ratios > 0, ratios, torch.nan).nanmedian()
    inexact = ratios[ratios > 0]
    middle = (inexact.size - 1) // 2
    return np.partition(inexact, middle)[middle] if inexact.size else 0.0


def _norm(values: Any) -> Any:
    return (values * values).sum() ** 0.5


@cache
def _format(left: torch.dtype, right: torch.dtype, result: torch.dtype, device: str) -> Format:
    return Format(inputs=(left, right), output=result, device=device)


def plain_weight(module: Any) -> Tensor | None:
    """The weight with which a linear layer computes, if it is an ordinary tensor and to read it runs no code."""
    if is_parametrized(module) or isinstance(getattr(type(module), "weight", None), property):
        return None
    found = module.weight
    return found if is_plain(found) and found.dim() == 2 else None


def is_plain(tensor: Any) -> bool:
    """True for ordinary dense tensors of floating-point numbers, none of a subclass."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.is_floating_point() and (
        tensor.layout == torch.strided and not tensor.is_nested
    )  # fmt: skip


def product_node(output: Tensor) -> tuple[Any, int] | None:
    """The node of the product whose result a linear layer returned, and which of its inputs is the layer's.

    None without one, or if the gradient of the input is not asked for.
    """
    node: Any = output.grad_fn
    while node is not None and kind_of(node) in RESHAPES:
        node = node.next_functions[0][0]
    place = None if node is None else _PLACES.get(kind_of(node))
    if place is None or node.next_functions[place][0] is None:
        return None
    return node, place
