"""What inputs and gradients of outputs give for the gradient of a weight, layer by layer.

Axis 0 of a weight has its rows, all other axes flattened are its columns. Letters in shapes: R rows of inputs or
outputs (all axes but the last), I inputs, O outputs, V tokens, D width, N samples, K probes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from traindiff.core.kernels.projection import projected, summed
from traindiff.core.witness import PROBES


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """What one call of a layer contributes to `aᵀ (dL/dW) b`.

    Attributes:
        totals: For each probe the sum of its terms over rows, then the sum of the squares of all terms, then that of
            the squares of the differences between terms of neighboring rows; float64, shape (TOTALS,). See `summed`.
        rows: Number of terms that are added up to each element of the gradient.
        shift: Of a normalization: the sum over all elements of `(g mean / deviation)²`, with the mean and deviation by
            which the input of the element was normalized. A number, or a scalar.
    """

    totals: Tensor
    rows: int | Tensor
    shift: float | Tensor = 0.0


def of_rows(left: Tensor, right: Tensor, *, rows: int | Tensor | None = None, shift: float | Tensor = 0.0) -> Products:
    """Terms `(g·a)(x·b)`, given by their two factors; a single row on the right counts for all rows."""
    left, right = _table(left), _table(right)
    return Products(totals=summed(left, right), rows=left.shape[0] if rows is None else rows, shift=shift)


def _table(factors: Tensor) -> Tensor:
    """Factors as a contiguous table of float64."""
    if factors.dtype == torch.float64 and factors.dim() == 2 and factors.is_contiguous():
        return factors
    return factors.reshape(-1, PROBES).double().contiguous()


def of_tensor(given: Tensor, signs: Tensor) -> Tensor:
    """Each row of a tensor, along its last axis, times each probe; float64, shape (R, K)."""
    return projected(given.detach().reshape(-1, given.shape[-1]), signs)


def convolution(
    given: Tensor, module: Any, b: Tensor, *, padding: Callable[[Tensor], Tensor]
) -> Callable[[Tensor, Tensor], Products]:
    """For a convolution: `x * b`, with one output channel for each group and probe.

    Args:
        given: The input, with or without a batch axis.
        module: Has stride, padding, dilation and groups.
        b: Signs of the columns of the weight; shape (K, columns).
        padding: Pads the input as the module does, so that the convolution does not.

    Returns:
        A function of the gradient of the output and the signs of the weight's rows, shape (K, O).
    """
    groups, kernel = module.groups, module.kernel_size
    dims = len(kernel)
    batched = given.dim() == dims + 2
    x = padding(as_float(given if batched else given[None]))
    weight = b.reshape(PROBES, -1, *kernel).repeat(groups, *(1 for _ in range(dims + 1)))
    projected_input = _CONVOLUTIONS[dims](
        x, weight.to(x.dtype), None, module.stride, 0, module.dilation, groups
    ).unflatten(1, (groups, PROBES))

    def products(gradient: Tensor, signs: Tensor) -> Products:
        g = as_float(gradient if batched else gradient[None]).unflatten(1, (groups, -1)).flatten(3)
        q = torch.einsum("ngop,kgo->ngpk", g, signs.to(g.dtype).unflatten(1, (groups, -1)))
        return _of_positions(q, projected_input.flatten(3).transpose(2, 3), gradient)

    return products


def transposed_convolution(given: Tensor, module: Any, signs: Tensor) -> Callable[[Tensor, Tensor], Products]:
    """For a transposed convolution: the convolution of the gradient with the signs, times the input.

    Args:
        given: The input, with or without a batch axis.
        module: Has stride, padding, dilation and groups. Its weight has the shape (I, O / groups, *kernel).
        signs: Signs of the rows of the weight.

    Returns:
        A function of the gradient of the output and the signs of the weight's columns.
    """
    groups, kernel = module.groups, module.kernel_size
    dims = len(kernel)
    batched = given.dim() == dims + 2
    x = as_float(given if batched else given[None])
    places = x.shape[2:]
    p = torch.einsum(
        "ngip,kgi->ngpk", x.unflatten(1, (groups, -1)).flatten(3), signs.to(x.dtype).unflatten(1, (groups, -1))
    )

    def products(gradient: Tensor, columns: Tensor) -> Products:
        g = as_float(gradient if batched else gradient[None])
        weight = columns.reshape(PROBES, -1, *kernel).repeat(groups, *(1 for _ in range(dims + 1)))
        found = _CONVOLUTIONS[dims](g, weight.to(g.dtype), None, module.stride, module.padding, module.dilation, groups)
        for dim, length in enumerate(places, 2):
            found = found.narrow(dim, 0, length)  # output_padding may give one position more
        q = found.unflatten(1, (groups, PROBES)).flatten(3).transpose(2, 3)
        return _of_positions(q, p, gradient)

    return products


def adds_samples(output: Tensor) -> bool:
    """True if a convolution may add up the gradients of its weight over samples in the short dtype of its output.

    torch does on the CPU, one sample after the other, where the processor has no instructions for this dtype.
    """
    return output.device.type == "cpu" and output.dtype in (torch.bfloat16, torch.float16)


def _of_positions(q: Tensor, p: Tensor, gradient: Tensor) -> Products:
    """`of_rows` of factors of shape (N, groups, positions, K); of one row for each sample if `adds_samples`."""
    if not adds_samples(gradient):
        return of_rows(q, p, rows=q.shape[0] * q.shape[2])
    return of_rows((q.double() * p.double()).sum((1, 2)), q.new_ones(1, PROBES))


_CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {
    1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d
}  # fmt: skip


def padded(module: Any) -> Callable[[Tensor], Tensor]:
    """A function that pads an input as a convolution does."""
    if module.padding == "valid":
        return lambda x: x
    if module.padding == "same":
        sides = [
            side
            for stretch, length in zip(reversed(module.dilation), reversed(module.kernel_size), strict=True)
            for total in [stretch * (length - 1)]
            for side in (total // 2, total - total // 2)
        ]
    else:
        sides = [side for length in reversed(module.padding) for side in (length, length)]
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return lambda x: functional.pad(x, sides, mode=mode) if any(sides) else x


def embedding(module: nn.Embedding, tokens: Tensor, signs: Tensor) -> Callable[[Tensor, Tensor], Products]:
    """For an embedding: the signs of the tokens' rows, shape (V, K), times the gradient's product with the columns'."""
    flat = tokens.detach().reshape(-1)
    p = signs[flat]
    if module.padding_idx is not None:
        p = p * (flat != module.padding_idx)[:, None]
    counts = torch.zeros(module.num_embeddings, dtype=torch.float64, device=flat.device)
    counts.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.float64))
    if module.scale_grad_by_freq:
        p = p / counts[flat][:, None]
    most = counts.max()

    def products(gradient: Tensor, columns: Tensor) -> Products:
        return of_rows(of_tensor(gradient, columns), p, rows=most)

    return products


def embedding_bag(
    module: nn.EmbeddingBag, tokens: Tensor, offsets: Tensor | None, weights: Tensor | None, signs: Tensor
) -> Callable[[Tensor, Tensor], Products]:
    """The same for an embedding whose rows are added up, or averaged, in bags."""
    flat = tokens.detach().reshape(-1).long()
    if offsets is None:
        num_bags, length = tokens.shape
        bag = torch.arange(num_bags, device=flat.device).repeat_interleave(length)
    else:
        starts = offsets.detach().long()
        if module.include_last_offset:
            starts = starts[:-1]
        num_bags = starts.numel()
        marks = torch.zeros(flat.numel() + 1, dtype=torch.long, device=flat.device)
        marks.scatter_add_(0, starts, torch.ones_like(starts))
        bag = marks.cumsum(0)[:-1] - 1
    p = signs[flat]
    kept = torch.ones_like(flat, dtype=torch.float64)
    if module.padding_idx is not None:
        kept = kept * (flat != module.padding_idx)
    if weights is not None:
        p = p * weights.detach().reshape(-1, 1).double()
    counts = torch.zeros(module.num_embeddings, dtype=torch.float64, device=flat.device).scatter_add_(0, flat, kept)
    if module.scale_grad_by_freq:
        p = p / counts[flat][:, None].clamp_min(1.0)
    p = p * kept[:, None]
    sums = torch.zeros(num_bags, PROBES, dtype=torch.float64, device=flat.device).index_add_(0, bag, p)
    if module.mode == "mean":
        sizes = torch.zeros(num_bags, dtype=torch.float64, device=flat.device).index_add_(0, bag, kept)
        sums = sums / sizes.clamp_min(1.0)[:, None]
    most = counts.max()

    def products(gradient: Tensor, columns: Tensor) -> Products:
        return of_rows(of_tensor(gradient, columns), sums, rows=most)

    return products


def largest_in_bags(chosen: Tensor, sizes: Tensor, signs: Tensor) -> Callable[[Tensor, Tensor], Products]:
    """The same for an embedding that keeps the largest number of each column in a bag.

    Args:
        chosen: The row of the table from which each element of the output is, shape (bags, width).
        sizes: Number of rows in each bag.
        signs: Of the table's rows, shape (V, K).
    """
    p = (signs[chosen.long()] * (sizes > 0)[:, None, None]).flatten(0, 1)

    def products(gradient: Tensor, columns: Tensor) -> Products:
        q = as_float(gradient)[:, :, None].double() * columns.T.double()
        return of_rows(q.flatten(0, 1), p, rows=chosen.shape[0])

    return products


def scaled(normalized: Tensor | None, gradient: Tensor, dims: int, *, axis: int | None) -> Tensor:
    """The terms of the gradient of a weight that scales a normalized tensor, element by element; or of a bias.

    Args:
        normalized: The normalized tensor; None for a bias.
        gradient: Gradient of the output.
        dims: Number of axes of the weight.
        axis: Axis of the tensor that the weight lies along; None for its last axes.

    Returns:
        Shape (rows, elements of the weight); in float32 at least, except for a bias.
    """
    product = gradient.detach() if normalized is None else as_float(gradient) * normalized
    if axis is None:
        return product.flatten(-dims).flatten(0, -2) if product.dim() > dims else product.reshape(1, -1)
    return product.movedim(axis, -1).flatten(0, -2) if product.dim() > 1 else product[None]


def as_float(tensor: Tensor) -> Tensor:
    """A tensor in float32 at least, without its graph."""
    found = tensor.detach()
    return found.to(torch.promote_types(found.dtype, torch.float32))
