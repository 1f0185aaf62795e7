"""Parameters that a recipe ties, and that several stages of a pipeline hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn

from traindiff.setups.parameters import Names
from traindiff.site import canonical_path


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """One parameter that several ranks hold.

    Attributes:
        parameter: This rank's.
        group: The ranks that hold it.
        is_counted_here: Whether this rank is the one of them that counts its gradient in a norm.
    """

    parameter: nn.Parameter
    group: Any
    is_counted_here: bool


def shared_parameters(part: nn.Module, names: Names) -> list[Shared]:
    """Of the parameters of this rank's part, those that others hold, too. A collective.

    Args:
        part: This rank's part of the model.
        names: Of the whole model's parameters.
    """
    mine = {
        names.first[name]: parameter
        for path, parameter in part.named_parameters()
        if (name := canonical_path(path)) in names.first
    }
    everyones: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyones, sorted(mine))
    found = []
    for name in sorted({name for held in everyones for name in held}):
        ranks = [rank for rank, held in enumerate(everyones) if name in held]
        if len(ranks) > 1:
            group = distributed.new_group(ranks)  # by all ranks, also those that are not in it
            if name in mine:
                is_first = distributed.get_rank() == ranks[0]
                found.append(Shared(parameter=mine[name], group=group, is_counted_here=is_first))
    return found


def add_up_gradients(shared: Sequence[Shared]) -> None:
    """Give every rank the sum of all gradients of what they share."""
    for one in shared:
        if one.parameter.grad is None:
            one.parameter.grad = torch.zeros_like(one.parameter)
        distributed.all_reduce(one.parameter.grad, group=one.group)


def clip_over_stages(part: nn.Module, largest_norm: float, shared: Sequence[Shared]) -> None:
    """Scale the gradients of all stages down to a norm of all of them together. A collective."""
    elsewhere = {id(one.parameter) for one in shared if not one.is_counted_here}
    parameters = [parameter for parameter in part.parameters() if parameter.grad is not None]
    counted = [one.grad for one in parameters if id(one) not in elsewhere and one.grad is not None]
    square = nn.utils.get_total_norm(counted).square()
    distributed.all_reduce(square)
    nn.utils.clip_grads_with_norm_(parameters, largest_norm, square.sqrt())
