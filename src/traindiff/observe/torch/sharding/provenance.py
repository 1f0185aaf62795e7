"""The regions of plain tensors that were computed from local tensors of DTensors, read from the graph of autograd.

Under `parallelize_module`, modules pass on local tensors. The node that took one out of a DTensor knows the placements.
An elementwise result covers the same region as its operands, and views are followed. So nothing is guessed, and no
other rank is asked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

from torch import Tensor

from traindiff.core.shards import Ranges, Region, Regions
from traindiff.core.torch_compat.autograd import result_shape, saved_dims
from traindiff.core.torch_compat.training import TO_LOCAL
from traindiff.observe.torch.sharding.distributed_tensor import region_placed

MOST_RANGES = 256
"""Most ranges of a merged axis. Each has a summary of its own; 256 samples of a micro-batch may have one each."""

_Group = tuple[Sequence[int], Sequence[int]]
"""Axes before a view, and the axes that they become."""


def permuted(region: Region, order: Sequence[int]) -> Region:
    """The region after `permute(order)`."""
    return Region(
        shape=tuple(region.shape[dim] for dim in order), ranges=tuple(region.ranges[dim] for dim in order),
        term=region.term,
    )  # fmt: skip


def viewed(region: Region, shape: Sequence[int]) -> Region | None:
    """The region of a local tensor after `view(shape)`; None if it is no longer a product of ranges."""
    whole: list[int] = []
    ranges: list[Ranges] = []
    for before, after in _groups(region.local_shape, shape):
        found = _one_group(region, before, [shape[dim] for dim in after])
        if found is None:
            return None
        whole += found[0]
        ranges += found[1]
    return Region(shape=tuple(whole), ranges=tuple(ranges), term=region.term)


def _groups(before: Sequence[int], after: Sequence[int]) -> Iterator[_Group]:
    """The smallest groups of axes that become groups of as many elements, from left to right."""
    at_before, at_after = 0, 0
    while at_before < len(before) or at_after < len(after):
        first = [at_before] if at_before < len(before) else []
        second = [at_after] if at_after < len(after) else []
        while (held := prod(before[i] for i in first)) != (becomes := prod(after[i] for i in second)):
            grown, begins, length = (
                (first, at_before, len(before)) if held < becomes else (second, at_after, len(after))
            )
            if begins + len(grown) >= length:
                break
            grown.append(begins + len(grown))
        yield first, second
        at_before, at_after = at_before + len(first), at_after + len(second)


def _one_group(region: Region, before: Sequence[int], after: Sequence[int]) -> tuple[list[int], list[Ranges]] | None:
    shape, ranges = [region.shape[dim] for dim in before], [region.ranges[dim] for dim in before]
    if all(one == ((0, length),) for one, length in zip(ranges, shape, strict=True)):
        return list(after), [((0, length),) for length in after]
    if len(before) == 1 and after and (first := _split(shape[0], ranges[0], prod(after[1:]))) is not None:
        return [first[0], *after[1:]], [first[1], *(((0, length),) for length in after[1:])]
    if len(after) == 1 and (merged := _merged(shape, ranges)) is not None:
        return [prod(shape)], [merged]
    return None


def _split(length: int, ranges: Ranges, inner: int) -> tuple[int, Ranges] | None:
    """An axis after blocks of `inner` elements become an axis of their own."""
    if not inner or any(number % inner for number in (length, *sum(ranges, ()))):
        return None
    return length // inner, tuple((first // inner, count // inner) for first, count in ranges)


def _merged(shape: Sequence[int], ranges: Sequence[Ranges]) -> Ranges | None:
    """Several axes as one."""
    cut = [dim for dim, one in enumerate(ranges) if one != ((0, shape[dim]),)]
    inner = prod(shape[cut[-1] + 1 :])
    outer = [[index for first, count in one for index in range(first, first + count)] for one in ranges[: cut[-1]]]
    if prod(map(len, outer)) * len(ranges[cut[-1]]) > MOST_RANGES:
        return None
    found: list[tuple[int, int]] = []
    for indices in product(*outer):
        start = 0
        for index, length in zip(indices, shape, strict=False):
            start = start * length + index
        start *= shape[cut[-1]]
        found += [((start + first) * inner, count * inner) for first, count in ranges[cut[-1]]]
    return tuple(found)


_ELEMENT_BY_ELEMENT = re.compile(
    "(?:Abs|Add|Alias|Clamp|Clone|Div|Dropout|Elu|Erf|Exp|FusedRmsNorm|Gelu|Hardsigmoid|Hardswish|Hardtanh|LeakyRelu|Log"
    "|LogSoftmax|MaskedFill|Mul|NativeDropout|NativeLayerNorm|Neg|Pow|Relu|Rsub|Rsqrt|Sigmoid|Silu|Softmax|Softplus"
    "|Sqrt|Square|Sub|Tanh|Threshold|ToCopy|Where|ScaledDotProduct[A-Za-z]*)Backward[0-9]?"
)
"""Nodes of elementwise operations: the result has the region of the operands with its shape.

The result of attention has the region of the queries.
"""

_VIEW = re.compile("(?:ReshapeAlias|UnsafeView|View)Backward[0-9]?")

_DEEPEST = 64
_KEY = "traindiff.regions"


def regions_of(tensor: Tensor) -> Regions | None:
    """The regions of a plain tensor and its gradient in a global tensor; None if they are unknown.

    Args:
        tensor: With its graph. Without a graph, as in evaluation, the regions are unknown.
    """
    regions = _of_node(tensor.grad_fn, _DEEPEST)
    return regions if regions is not None and regions.value.local_shape == tuple(tensor.shape) else None


def _of_node(node: Any, depth: int) -> Regions | None:
    if node is None or not depth:
        return None
    name = type(node).__name__
    if name == TO_LOCAL:
        return _of_local(node)
    known: Regions | None = node.metadata.get(_KEY)
    if known is None:
        if _ELEMENT_BY_ELEMENT.fullmatch(name):
            known = _of_operands(node, depth - 1)
        elif moved := _moved(node, name):
            known = _after(_of_node(node.next_functions[0][0], depth - 1), moved)
        if known is not None:
            node.metadata[_KEY] = known  # later walks from other tensors end here
    return known


def _of_local(node: Any) -> Regions:
    spec = node.dtensor_spec
    value = region_placed(spec.shape, spec.mesh, spec.placements)
    if node.grad_placements is not None:
        return Regions(value=value, gradient=region_placed(spec.shape, spec.mesh, node.grad_placements))
    # Each term of a sum has the gradient of the sum.
    kept = [None if placement.is_partial() else placement for placement in spec.placements]
    gradient = region_placed(spec.shape, spec.mesh, kept)
    return Regions(value=value, gradient=gradient)


def _of_operands(node: Any, depth: int) -> Regions | None:
    """The common region of the operands that have the shape of the result."""
    shape = result_shape(node, 0)
    operands = [
        _of_node(operand, depth)
        for operand, number in node.next_functions
        if operand is not None and result_shape(operand, number) == shape
    ]
    known = [regions for regions in operands if regions is not None]
    if not known or any(regions != known[0] for regions in known):
        return None
    value = known[0].value
    if value.term is not None:
        return None  # the result depends on the operation
    # Beside a part, another operand can only be the same part; beside a copy, it may be anything.
    return None if value.is_whole and len(known) < len(operands) else known[0]


def _moved(node: Any, name: str) -> Callable[[Region], Region | None] | None:
    """The function from the operand's region to the result's, for nodes that only move elements; else None."""
    if _VIEW.fullmatch(name):
        shape = result_shape(node, 0)
        return lambda region: viewed(region, shape)
    if name == "TransposeBackward0":
        return lambda region: permuted(region, _transposed(len(region.shape), *saved_dims(node)))
    if name == "PermuteBackward0":
        return lambda region: permuted(region, [dim % len(region.shape) for dim in saved_dims(node)])
    if name == "ViewAsRealBackward0":
        return lambda region: Region(shape=(*region.shape, 2), ranges=(*region.ranges, ((0, 2),)), term=region.term)
    if name == "ViewAsComplexBackward0":
        return lambda region: Region(shape=region.shape[:-1], ranges=region.ranges[:-1], term=region.term)
    return None


def _after(regions: Regions | None, moved: Callable[[Region], Region | None]) -> Regions | None:
    if regions is None:
        return None
    value, gradient = moved(regions.value), moved(regions.gradient)
    return None if value is None or gradient is None else Regions(value=value, gradient=gradient)


def _transposed(count: int, first: int, second: int) -> list[int]:
    order = list(range(count))
    order[first], order[second] = order[second], order[first]
    return order
