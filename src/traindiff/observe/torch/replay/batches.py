"""Ranges of several parameters that one call of a formula replays together.

A formula takes dozens of small operations, whatever the number of elements is. Most parameters are small, so most of
the time of a replay would be the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from traindiff.observe.torch.replay.copied_range import CopiedRange

MOST_ELEMENTS = 2**16
"""The most elements of a batch, unless a range alone has more: the formula's intermediate results stay in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Ranges whose elements follow each other in one.

    Attributes:
        ranges: The ranges.
        whole: All their elements as one range. Where they lie, and what they are after the step, only `ranges` know.
        gradient: The gradient of these elements; None if the first range has none.
    """

    ranges: tuple[CopiedRange, ...]
    whole: CopiedRange
    gradient: Tensor | None

    def taken(self) -> Tensor:
        """The elements as they are now minus what they were, float64, flat."""
        return torch.cat([one.taken() for one in self.ranges]) if len(self.ranges) > 1 else self.whole.taken()

    def parts(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """What belongs to each range, of a flat tensor with a number for each element."""
        found: tuple[Tensor, ...] = tensor.split([one.elements.numel() for one in self.ranges])
        return found


def batches(copied: Sequence[CopiedRange], read: Callable[[Tensor], float]) -> Iterator[Batch]:
    """Yield batches of neighbours that a formula treats alike: same settings, numbers, dtypes and device.

    A formula that needs whole parameters gets each alone, and so does one that a user declared: it may need them too.

    Args:
        copied: The ranges; their order is kept.
        read: The number in a tensor of `CopiedRange.scalars`.
    """
    waiting: list[tuple[CopiedRange, Tensor | None]] = []
    before, size = None, 0
    for one in copied:
        gradient = one.latest_gradient()
        kind = _kind(one, gradient, read)
        size += one.elements.numel()
        if waiting and (kind is None or kind != before or size > MOST_ELEMENTS):
            yield _joined(waiting)
            waiting, size = [], one.elements.numel()
        waiting.append((one, gradient))
        before = kind
    if waiting:
        yield _joined(waiting)


def _kind(one: CopiedRange, gradient: Tensor | None, read: Callable[[Tensor], float]) -> tuple[Any, ...] | None:
    """What ranges of a batch have in common; None for one that stays alone."""
    if gradient is None or one.formula.needs_whole or one.formula.is_users or one.terms is not None:
        return None
    if any(state.numel() != one.elements.numel() for state in one.state.values()):
        return None
    numbers = (one.numbers | {"scale": one.scale, "overflowed": one.overflowed}).items()
    return (
        one.formula.name, id(one.settings), one.short, one.parameter.is_complex(), one.elements.device,
        one.elements.dtype, gradient.dtype, tuple((name, state.dtype) for name, state in one.state.items()),
        tuple((name, _number(value, read)) for name, value in numbers),
    )  # fmt: skip


def _number(value: Any, read: Callable[[Tensor], float]) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, read(value)
    return value if isinstance(value, (int, float, str, type(None))) else id(value)


def _joined(of: Sequence[tuple[CopiedRange, Tensor | None]]) -> Batch:
    ranges = tuple(one for one, _ in of)
    first, gradient = of[0]
    if len(of) == 1:
        return Batch(ranges=ranges, whole=first, gradient=gradient)
    elements = torch.cat([one.elements for one in ranges])
    gradient = torch.cat([one for _, one in of if one is not None])
    state = {name: torch.cat([one.state[name].reshape(-1) for one in ranges]) for name in first.state}
    whole = replace(first, elements=elements, gradient=gradient, state=state, shape=tuple(elements.shape))
    return Batch(ranges=ranges, whole=whole, gradient=gradient)
