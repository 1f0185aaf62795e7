"""Copy what a step of an optimizer starts from, as much of it as is replayed at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from traindiff.core.shards import Piece, Shard
from traindiff.observe.torch.replay.copied_range import (
    CopiedRange,
    Placed,
    left_with,
    local_part,
    next_part,
    sparse_terms,
)
from traindiff.observe.torch.replay.formulas import Known

RANGE = 2**14
"""The number of elements of a parameter that are replayed in a step; the next replay takes the next ones."""

WHOLE = 2**22
"""The most elements of a parameter whose formula needs all of them."""

NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})
"""Entries of states that are one number, also for parameters without a dim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A tensor that the step will change: all of it, or with a formula for elements, one piece.

    Attributes:
        number: Number of its group.
        parameter: The tensor.
        pieces: The selected pieces of it.
        state: What the optimizer keeps of it.
        divided: Whether this rank has rows or columns of a matrix whose formula needs all of it.
    """

    number: int
    parameter: Tensor
    pieces: tuple[Piece, ...]
    state: Mapping[str, Any]
    divided: bool = False

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The entries of the state that are tensors of more than a number."""
        return {name: one for name, one in self.state.items() if _is_of(name, one, self.parameter)}

    @property
    def element_bytes(self) -> int:
        """The bytes of an element with its gradient and state."""
        gradient = [] if self.parameter.grad is None else [self.parameter.grad]
        return sum(one.element_size() for one in (self.parameter, *gradient, *self.tensors.values()))

    def shards(self) -> list[tuple[Piece, Shard]]:
        """The pieces with their places in the model's parameters."""
        return [(piece, piece.shard or Shard.whole(tuple(self.parameter.shape))) for piece in self.pieces]

    def work(self, known: Known) -> int:
        """What the products of a whole matrix cost: elements times the shorter side; 0 for formulas of elements."""
        shape = self.shards()[0][1].shape if self.divided else self.parameter.shape
        return math.prod(shape) * min(shape[-2:]) if known.formula.needs_whole and len(shape) > 1 else 0

    def next_elements(self, start: int, capacity_bytes: int, *, whole: bool) -> tuple[slice, tuple[Placed, ...]]:
        """The elements of the local tensor to copy, and the places of those that are recorded.

        Args:
            start: Of the only piece, the element to begin with.
            capacity_bytes: The most bytes to copy.
            whole: Whether to copy the whole tensor.
        """
        if whole:
            places = tuple(
                Placed(path=piece.path, part=slice(piece.first, piece.first + shard.size), shard=shard)
                for piece, shard in self.shards()
            )
            return slice(0, places[0].shard.size if self.divided else self.parameter.numel()), places
        ((piece, shard),) = self.shards()
        most = min(RANGE, max(1, capacity_bytes // self.element_bytes))
        part, place = next_part(shard, start, most)
        placed = Placed(path=piece.path, part=slice(0, part.stop - part.start), shard=place)
        return slice(piece.first + part.start, piece.first + part.stop), (placed,)


def copy_elements(
    optimizer: Optimizer,
    known: Known,
    held: Held,
    part: slice,
    placed: tuple[Placed, ...],
    *,
    settings: Sequence[dict[str, Any]],
    rates: Sequence[float | None],
    has_closure: bool,
    is_compiled: bool,
) -> CopiedRange:
    """Copy elements of a tensor, of its gradient and of its state.

    Args:
        optimizer: The optimizer that will step.
        known: Its formula.
        held: The tensor.
        part: The elements of the local tensor.
        placed: The places of those that are recorded.
        settings: The settings of all groups.
        rates: The learning rates of the step before, by group.
        has_closure: Whether a closure has yet to compute the gradient.
        is_compiled: Whether the step runs in compiled code.
    """
    parameter, group = held.parameter, optimizer.param_groups[held.number]
    elements, gradient = local_part(parameter, part).clone(), None if has_closure else parameter.grad
    shape = (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)
    shape = placed[0].shard.shape if held.divided else shape
    tensors = held.tensors
    return CopiedRange(
        placed=placed,
        parameter=parameter,
        part=part,
        shape=shape if known.formula.needs_whole else tuple(elements.shape),
        formula=known.formula,
        divided=held.divided,
        settings=settings[held.number],
        others=_other_settings(held.number, settings, rates),
        elements=elements,
        gradient=None if gradient is None else local_part(gradient, part).clone(),
        state={
            name: local_part(one, part).clone() if _is_like(one, parameter) else one.detach().clone()
            for name, one in tensors.items()
        },
        numbers={
            name: one.detach().clone() if isinstance(one, Tensor) else one
            for name, one in held.state.items()
            if name not in tensors and one is not None
        },
        terms=sparse_terms(gradient, part),
        scale=left_with(optimizer, "grad_scale"),
        overflowed=left_with(optimizer, "found_inf"),
        short=is_compiled or any(bool(group.get(name)) for name in ("capturable", "differentiable", "fused")),
    )


def _other_settings(
    number: int, settings: Sequence[dict[str, Any]], rates: Sequence[float | None]
) -> dict[str, dict[str, Any]]:
    """Settings that a mistaken optimizer may use instead of those of a group: of the step before, of other groups."""
    before = rates[number] if number < len(rates) else None
    found = {} if before is None else {"the step before": {"lr": before}}
    others = [other for other in range(len(settings)) if other != number]
    return {**found, **{f"groups[{other}]": settings[other] for other in others[:4]}}


def _is_like(value: Tensor, parameter: Tensor) -> bool:
    """True if a tensor of the state has a number for each element of the parameter."""
    return value.shape == parameter.shape or (value.numel() == parameter.numel() and value.dim() > 0)


def _is_of(name: str, value: Any, parameter: Tensor) -> bool:
    """True if an entry of the state is a tensor of more than a number."""
    if not isinstance(value, Tensor) or (not value.dim() and name in NUMBERS):
        return False
    return _is_like(value, parameter) or value.numel() > 1
