"""Check of convolutions and of their two gradients: with random signs, they too are products with a few vectors.

* A convolution, and the gradient of its input, which is a transposed one: the sum of the output channels with random
  signs is the convolution with the sum of the filters with these signs.
* The gradient of the weight: its product with a random filter is the product of the output's gradient with the
  convolution of the input with this filter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from traindiff.observe.torch.products.residuals import (
    MOST_ELEMENTS,
    NUM_VECTORS,
    Residual,
    norms,
    residual,
    signs,
    zeros,
)
from traindiff.observe.torch.products.rounding import Format, RowSizes, added_up, allowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The settings of a convolution, as `aten.convolution` takes them."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int

    def apply(self, images: Tensor, weight: Tensor, shape: Sequence[int], *, groups: int = 1) -> Tensor:
        """The convolution of some images; of a larger one, the part with this shape (all axes but two)."""
        found: Tensor = torch.ops.aten.convolution.default(
            images, weight, None, self.stride, self.padding, self.dilation, self.transposed, self.output_padding, groups
        )
        for axis, size in enumerate(shape, start=2):
            found = found.narrow(axis, 0, size)
        return found

    def adjoint(self, weight: Tensor, output: Sequence[int], images: Sequence[int]) -> Geometry:
        """The settings of the convolution that makes the gradient of the input from that of the output.

        Args:
            weight: The weight of the convolution itself.
            output: Shape of the output.
            images: Shape of the input.
        """
        if self.transposed:
            return replace(self, transposed=False, output_padding=[0] * len(self.stride))
        reached = [
            (size - 1) * self.stride[axis] - 2 * self.padding[axis] + self.dilation[axis] * (width - 1) + 1
            for axis, (size, width) in enumerate(zip(output[2:], weight.shape[2:], strict=True))
        ]
        missing = [size - end for size, end in zip(images[2:], reached, strict=True)]
        return replace(self, transposed=True, output_padding=missing)


def check(images: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor, how: Geometry, form: Format) -> Residual:
    """Check a convolution.

    Args:
        images: Shape (N, C, ...).
        weight: Its weight, as torch lays it out: transposed convolutions have the input's channels first.
        bias: Its bias.
        output: What was returned, shape (N, O, ...).
        how: Its settings.
        form: Dtypes.

    Returns:
        One row for each position of each image, over all channels: shape (N, ...).
    """
    num_channels = output.shape[1]
    vectors = signs(num_channels, output.device)
    filters, squares = _projected(weight, vectors, how)
    shift, shift_norm = zeros((NUM_VECTORS,), output.device), zeros((), output.device)
    if bias is not None:
        shift, shift_norm = bias.to(torch.float64) @ vectors, bias.to(torch.float64).norm()
    errors, bounds, sizes, scales = (zeros((output.shape[0], *output.shape[2:]), output.device) for _ in range(4))
    for some in _images(images, math.prod(weight.shape[2:]) * images[0].numel() + output[0].numel()):
        part = images[some].to(torch.float64)
        exact = how.apply(part, filters, output.shape[2:]).movedim(1, -1)
        terms = _terms(part, squares, how, output.shape[2:]).squeeze(1)
        found = output[some].to(torch.float64).movedim(1, -1)
        own = found.norm(dim=-1)
        # Some algorithms compute a tile or an image at once, e.g. by Fourier transforms: their sums are as large as its
        # largest ones everywhere.
        most = _everywhere(torch.maximum(torch.maximum(norms(exact), terms), own))
        measured = RowSizes(
            result=own, added=torch.zeros_like(own) + shift_norm,
            terms=_everywhere(terms), partial=most, num_columns=num_channels,
            num_terms=num_terms(weight, how.groups, transposed=how.transposed),
            rounded=torch.maximum(terms, own) * math.sqrt(math.prod(weight.shape[2:])) if how.transposed else 0.0,
        )  # fmt: skip
        errors[some] = norms(found @ vectors - shift - exact)
        bounds[some] = allowed(form, measured, squares.sum().sqrt() + part.abs().amax())
        sizes[some], scales[some] = norms(exact + shift), terms
    return residual(errors, bounds, sizes, scales)


def check_weight_gradient(
    images: Tensor, gradient: Tensor, weight_gradient: Tensor, how: Geometry, form: Format
) -> Residual:
    """Check the gradient of a convolution's weight.

    Args:
        images: The input, shape (N, C, ...).
        gradient: The gradient of the output, shape (N, O, ...).
        weight_gradient: What was returned.
        how: The settings of the convolution.
        form: Dtypes.

    Returns:
        One row for each channel that comes first in the weight's layout: that of the output, or of the input of a
        transposed convolution.
    """
    if how.transposed:  # the two change roles
        images, gradient = gradient, images
    plain = replace(how, transposed=False, output_padding=[0] * len(how.stride))
    groups, shape = how.groups, weight_gradient.shape
    flat = weight_gradient.reshape(shape[0], -1)
    vectors = signs(flat.shape[1], flat.device)
    filters = vectors.T.reshape(NUM_VECTORS, *shape[1:]).repeat(groups, *[1] * (len(shape) - 1))
    ones = zeros((groups, *shape[1:]), flat.device) + 1.0
    exact, squares = zeros((shape[0], NUM_VECTORS), flat.device), zeros((shape[0],), flat.device)
    partial = torch.zeros_like(squares)
    for some in _images(images, math.prod(shape[2:]) * images[0].numel() + gradient[0].numel()):
        part, back = images[some].to(torch.float64), gradient[some].to(torch.float64)
        back = back.flatten(2).unflatten(1, (groups, -1))
        convolved = plain.apply(part, filters, gradient.shape[2:], groups=groups).flatten(2).unflatten(1, (groups, -1))
        exact = exact + torch.einsum("ngoq,ngvq->gov", back, convolved).flatten(0, 1)
        terms = _terms(part, ones, plain, gradient.shape[2:], groups=groups).square().flatten(2)
        squares = squares + torch.einsum("ngoq,ngq->go", back.square(), terms).flatten()
        partial = torch.maximum(partial, norms(exact))
    terms, found = squares.sqrt(), flat.to(torch.float64)
    partial = torch.maximum(partial, terms)
    measured = RowSizes(
        result=found.norm(dim=-1), added=torch.zeros_like(terms), terms=terms, partial=partial,
        num_columns=flat.shape[1], num_terms=max(1, gradient.numel() // max(1, gradient.shape[1])),
        rounded=added_up(terms, partial, images.shape[0]) if form.device == "cpu" else 0.0,
    )  # fmt: skip
    bound = allowed(form, measured, gradient.abs().amax().to(torch.float64) + images.abs().amax().to(torch.float64))
    return residual(norms(found @ vectors - exact), bound, norms(exact), terms)


def _projected(weight: Tensor, vectors: Tensor, how: Geometry) -> tuple[Tensor, Tensor]:
    """The filters of all groups, summed with random signs, and the sum of their squares: weights for a single group.

    The sum over groups needs no further signs: each output channel has signs of its own.
    """
    groups, spatial = how.groups, weight.shape[2:]
    wide, split = weight.to(torch.float64), vectors.unflatten(0, (groups, -1))
    parts = wide.flatten(2).unflatten(0, (groups, -1))
    if how.transposed:  # (C, O / groups, ...)
        filters = torch.einsum("gcok,gov->gcvk", parts, split).flatten(0, 1).unflatten(-1, spatial)
        return filters, wide.square().sum(1, keepdim=True)
    filters = torch.einsum("gock,gov->vgck", parts, split).flatten(1, 2).unflatten(-1, spatial)  # (O, C / groups, ...)
    return filters, parts.square().sum(1).flatten(0, 1).unflatten(-1, spatial).unsqueeze(0)


def _terms(images: Tensor, squares: Tensor, how: Geometry, shape: Sequence[int], *, groups: int = 1) -> Tensor:
    """Root of the sum of the squares of all terms, float64; computed in float32, for it is a scale only."""
    tiny = torch.finfo(torch.float64).tiny
    highest, largest = images.abs().amax().clamp_min(tiny), squares.amax().clamp_min(tiny)
    with torch.autocast(images.device.type, enabled=False):
        found = how.apply((images / highest).square().float(), (squares / largest).float(), shape, groups=groups)
    return found.clamp_min(0.0).to(torch.float64).sqrt() * highest * largest.sqrt()


def _everywhere(sizes: Tensor) -> Tensor:
    """The largest size in each image, broadcast to all positions: (N, ...)."""
    largest = sizes.flatten(1).amax(1)
    return largest.reshape(-1, *[1] * (sizes.dim() - 1)).expand_as(sizes)


def _images(images: Tensor, elements: int) -> list[slice]:
    """Some images at a time: `elements` of each are converted."""
    count = max(1, MOST_ELEMENTS // max(1, elements))
    return [slice(first, first + count) for first in range(0, images.shape[0], count)]


def num_terms(weight: Tensor, groups: int, *, transposed: bool) -> int:
    """Terms of an element of the output, at most."""
    channels = weight.shape[0] // groups if transposed else weight.shape[1]
    return int(channels * math.prod(weight.shape[2:]))
