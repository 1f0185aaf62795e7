"""One use of a parameter in a call of a layer: what it contributes to the gradient, and with what rounding error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod

import torch
from torch import Tensor

from traindiff.core.kernels.contribution import Rounding, contribution
from traindiff.core.shards import Piece
from traindiff.core.summary import UNIT_ROUNDOFF
from traindiff.core.torch_compat.operators import float32_matmul_precision
from traindiff.observe.torch.witness.normalized import Normalized
from traindiff.observe.torch.witness.probes import Extent
from traindiff.observe.torch.witness.products import Products

FLOAT32 = UNIT_ROUNDOFF["float32"]
"""Unit roundoff of float32."""

_TF32 = 2.0**-11
_LEAST_FLOAT16 = 2.0**-25
"""Half the smallest number of float16: gradients below it become zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A parameter as a module holds it in a call.

    Attributes:
        path: Its canonical path.
        leaf: Id of the leaf of the graph that holds it.
        local: Its local elements.
        extent: What these are of it.
        divided: Whether ranks hold different parts of it, or work on different parts of the samples.
    """

    path: str
    leaf: int
    local: Tensor
    extent: Extent
    divided: bool


@dataclass(slots=True, kw_only=True)
class Use:
    """One use of a parameter.

    Attributes:
        path: The parameter's canonical path.
        leaf: Id of the leaf of the graph.
        products: What it contributes, given the gradient of the output of the call.
        result: Unit roundoff of the dtype in which the gradient is computed.
        operand: Unit roundoff of the conversion of the inputs; 0 without one.
        sums: Unit roundoff of the sum over rows.
        width: Numbers that are added up for one probe of one row.
        smallest: Below it, an element of the gradient is lost.
        size: Number of elements of the parameter.
        is_own: Whether each rank that works on the same samples has a term of its own.
        normalized: The normalized input on which `products` depends, if it does.
        is_contribution: It is what the backward pass has computed, whatever that followed from.
    """

    path: str
    leaf: int
    products: Callable[[Tensor], Products]
    result: float
    operand: float
    sums: float
    width: int
    smallest: float
    size: int
    is_own: bool
    normalized: Normalized | None = None
    is_contribution: bool = False

    def with_products(self, products: Callable[[Tensor], Products]) -> Use:
        """The same use in another call."""
        return Use(
            path=self.path, leaf=self.leaf, products=products, result=self.result, operand=self.operand, sums=self.sums,
            width=self.width, smallest=self.smallest, size=self.size, is_own=self.is_own, normalized=self.normalized,
            is_contribution=self.is_contribution,
        )  # fmt: skip

    def vector(self, found: Products) -> Tensor:
        """What `products` has given, laid out as `traindiff.core.witness` says; the errors are squared."""
        return contribution(found.totals, found.rows, found.shift, self._rounding)

    @property
    def _rounding(self) -> Rounding:
        exact = UNIT_ROUNDOFF["float64"] if self.sums < FLOAT32 else FLOAT32
        return Rounding(
            sums=self.sums, exact=exact, width=self.width, result=self.result, operand=self.operand,
            smallest=self.smallest, size=self.size,
        )  # fmt: skip


def contributed(held: Held, gradient: Tensor, sums: Tensor, piece: Piece) -> Use:
    """What a backward pass contributes to a parameter, as a use of it.

    Args:
        held: The parameter.
        gradient: The contribution.
        sums: What it gives for each probe.
        piece: The part of the parameter.
    """
    shape = held.extent.shape if piece.shard is None else (
        piece.shard.global_shape[0], prod(piece.shard.global_shape[1:])
    )  # fmt: skip
    # The mean square over the probes estimates the square of the norm. No sum over rows is expected.
    squares = sums.square().sum()
    found = Products(totals=torch.cat([sums, torch.stack([squares, 2.0 * squares])]), rows=0)
    placements = getattr(gradient, "placements", None)
    return Use(
        path=held.path, leaf=held.leaf, products=lambda _: found, result=max(roundoff(gradient), roundoff(held.local)),
        operand=0.0, sums=FLOAT32, width=sum(shape), smallest=smallest(gradient, held.local), size=held.local.numel(),
        is_own=held.divided if placements is None else any(not one.is_replicate() for one in placements),
        is_contribution=True,
    )  # fmt: skip


def roundoff(tensor: Tensor) -> float:
    """Unit roundoff of a tensor's dtype; 0 for whole numbers."""
    return _roundoff(tensor.dtype)


@cache
def _roundoff(dtype: torch.dtype) -> float:
    return UNIT_ROUNDOFF.get(str(dtype).removeprefix("torch."), 0.0)


def smallest(*tensors: Tensor) -> float:
    """The size of what is lost of an element near zero, in the dtypes of the tensors.

    That is half the smallest number of float16. In other dtypes it is the smallest normal number: terms of an element
    lose digits below it, and some hardware takes them for zero.
    """
    return max((_smallest(one.dtype) for one in tensors), default=0.0)


@cache
def _smallest(dtype: torch.dtype) -> float:
    if dtype == torch.float16:
        return _LEAST_FLOAT16
    return float(torch.finfo(dtype).smallest_normal) if dtype.is_floating_point else 0.0


def of_matrices(given: Tensor, *, is_convolution: bool) -> float:
    """Unit roundoff of the dtype to which kernels may convert the operands of products in float32."""
    if given.dtype != torch.float32:
        return 0.0
    precision = float32_matmul_precision()
    if precision == "medium":
        return UNIT_ROUNDOFF["bfloat16"]
    return _TF32 if precision == "high" or (is_convolution and given.is_cuda) else 0.0
