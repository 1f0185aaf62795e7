"""The tensors that an optimizer reads and writes in a step, in the order in which its tap records them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from traindiff.observe.torch.hooks.held_parameters import HeldParameters

Listed = tuple[Sequence[Any] | None, Any]
"""Tensors, None where a row says that there is none, and what the rows depend on beside the tensors.

Without a list, the tensors can only be recorded one by one.
"""


def main_gradient(parameter: Tensor) -> Tensor | None:
    """The gradient that a training keeps in `main_grad` of a parameter, as Megatron does; None without one."""
    found = getattr(parameter, "main_grad", None)
    return found if isinstance(found, Tensor) else None


def local_part(gradient: Tensor) -> Tensor:
    """The part of a gradient on this rank."""
    if type(gradient) is Tensor:
        return gradient
    with torch.no_grad():
        found: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return found


def has_numbers(gradient: Tensor | None) -> bool:
    """True if a gradient is not all zeros on this rank: this waits for the device. False for none, or a meta tensor."""
    if gradient is None or gradient.is_meta:
        return False
    local = local_part(gradient)
    with torch.no_grad():
        return bool((local.coalesce().values() if local.is_sparse else local).any())


def gradients_of(held: HeldParameters, *, stage: str) -> Listed:
    """The gradients of the selected parameters; a row for each that has none and should have one."""
    if not held.are_whole:
        return None, None
    parameters = held.tensors
    found = [one.grad for one in parameters]
    missing = [place for place, one in enumerate(found) if one is None]
    if not missing:
        return found, held.number
    if any(main_gradient(parameters[place]) is not None for place in missing):
        return None, None
    without = frozenset(place for place in missing if stage or not parameters[place].requires_grad)
    return [one for place, one in enumerate(found) if place not in without], (held.number, without)


def state_and_values(
    held: HeldParameters, states: Mapping[Tensor, Mapping[str, Any]], *, state: bool, values: bool
) -> Listed:
    """What an optimizer keeps of each selected parameter, and the parameter itself.

    Args:
        held: The parameters.
        states: What the optimizer keeps, by parameter.
        state: List it.
        values: List the parameters.
    """
    if not held.are_whole:
        return None, None
    found: list[Any] = []
    names: list[tuple[str, ...]] = []
    for parameter in held.tensors:
        if state and (kept := states.get(parameter)):
            names.append(tuple(kept))
            found += kept.values()
        else:
            names.append(())
        if values:
            found.append(parameter)
    # Which slots a state has depends on the parameter's shape.
    shapes = None if values else [one.shape for one in held.tensors]
    return found, (held.number, names, shapes)
