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

import torch
from torch import Tensor
from torch.nn.utils.parametrize import is_parametrized

from traindiff.core.kernels.product_errors import product_errors
from traindiff.core.kernels.row_sums import table_sums
from traindiff.core.kernels.torch_arrays import is_freed
from traindiff.observe.torch.products.rounding import Format, weights
from traindiff.observe.torch.witness.graph import RESHAPES, kind_of

_SEED = 0x50524F44

_PLACES = {"AddmmBackward": 1, "MmBackward": 0}
"""Number of the input of a linear layer among those of the node of its product."""


@lru_cache(maxsize=4096)
def signs(count: int, device: torch.device) -> Tensor:
    """Random signs, float64: always the same ones."""
    generator = torch.Generator().manual_seed(_SEED + count)
    drawn = torch.randint(0, 2, (count,), generator=generator)
    return (2.0 * drawn.to(torch.float64) - 1.0).to(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """The weight of a linear layer in one call, multiplied by signs.

    Attributes:
        shape: Number of outputs and of inputs.
        dtype: In which the product is computed: autocast converts weights.
        by_input: float64, shape (2, inputs): `Wᵀa`, and the squared norms of the weight's columns; None if
            it is not needed any more.
        by_output: float64, shape (2, outputs): `W b`, and the squared norms of its rows.
        largest: Norm of the weight.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    by_input: Tensor | None
    by_output: Tensor
    largest: Tensor | float


def factor_of(weight: Tensor, dtype: torch.dtype) -> Factor:
    """A weight, shape (outputs, inputs), as a product in a dtype uses it."""
    values = _in(weight, dtype)
    outputs, inputs = values.shape
    by_input, by_output, norm = table_sums(values, signs(outputs, values.device), signs(inputs, values.device))
    return Factor(shape=(outputs, inputs), dtype=dtype, by_input=by_input, by_output=by_output, largest=norm)


def check_output(factor: Factor, given: Tensor, bias: Tensor | None, output: Tensor) -> Tensor:
    """The check of what a linear layer returned; see `_checked`."""
    assert factor.by_input is not None
    drawn = signs(factor.shape[0], output.device)
    added = None if bias is None else _in(bias, factor.dtype)
    return _checked(_in(given, factor.dtype), factor, factor.by_input, output.detach(), drawn, added, output.shape[:-1])


def check_gradient(factor: Factor, gradient: Tensor, of_input: Tensor, rows: Sequence[int]) -> Tensor:
    """The check of the gradient of its input, given that of its output, and the shape of its rows; see `_checked`."""
    drawn = signs(factor.shape[1], of_input.device)
    return _checked(gradient.detach(), factor, factor.by_output, of_input.detach(), drawn, None, rows)


def _in(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A detached tensor in a dtype."""
    tensor = tensor.detach()
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


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
        added: What is added to each row, or None.
        rows: Shape of the rows as the layer was given them.

    Returns:
        float64, shape (8,), as `traindiff.core.witness` says, without synchronizing.
    """
    form = format_of(left.dtype, factor.dtype, found.dtype, found.device.type)
    terms, columns = left.shape[-1], signs.numel()
    by = weights(form, columns, terms)
    left, made = left.reshape(-1, terms), found.reshape(-1, columns)
    counts = terms, made.shape[0], prod(rows[1:])
    return product_errors(left, right, made, signs, added, by, factor.largest, counts)


@cache
def format_of(left: torch.dtype, right: torch.dtype, result: torch.dtype, device: str) -> Format:
    """The format of a product of two dtypes."""
    return Format(inputs=(left, right), output=result, device=device)


def plain_weight(module: Any) -> Tensor | None:
    """The weight with which a linear layer computes, if it is an ordinary tensor and to read it runs no code."""
    if is_parametrized(module) or isinstance(getattr(type(module), "weight", None), property):
        return None
    found = module.weight
    return found if is_plain(found) and found.dim() == 2 else None


def is_plain(tensor: Any) -> bool:
    """True for ordinary dense tensors of floating-point numbers, none of a subclass, whose memory is not freed."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.is_floating_point() and (
        tensor.layout == torch.strided and not tensor.is_nested and not is_freed(tensor)
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
