"""Several modules of one training as one: a rank of a pipeline may work on several of its stages."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from traindiff.site import part_name


class Parts(nn.Module):
    """Holds modules that are called one by one, and adds nothing to the names of what is in them.

    Args:
        parts: The modules, each with the names that it has in the whole model.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        super().__init__()
        for number, part in enumerate(parts):
            self.add_module(part_name(number), part)


def roots_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """What the training calls of a model: the model itself, or each of several parts of it."""
    return tuple(model.children()) if isinstance(model, Parts) else (model,)
