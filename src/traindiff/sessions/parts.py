"""Several modules of one training as one: stages of a pipeline, or models that are trained together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from traindiff.errors import Problem, type_of
from traindiff.site import WRAPPERS, part_name

_EMPTY = nn.Module()


class Parts(nn.Module):
    """Holds modules that are called one by one, and adds nothing to the names of what is in them.

    Args:
        parts: The modules, each with the names that it has in the whole model.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        super().__init__()
        for number, part in enumerate(parts):
            self.add_module(part_name(number), part)


class Together(nn.Module):
    """Holds several models of one training, e.g. the generator and the discriminator of a GAN.

    Args:
        models: The models by name; paths in each begin with it.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, model in models.items():
            self.add_module(name, model)


def together(models: Mapping[Any, Any], problems: list[Problem], caller: str) -> Together | None:
    """Several models by name as one; None where that cannot be.

    Args:
        models: As the user gave them.
        problems: Receives what is wrong with them.
        caller: The function to which the user gave them.
    """
    found = []
    for name, model in models.items():
        where = f"{caller}(model=...), {name!r}"
        if not isinstance(name, str) or not can_be_name(name):
            fix = 'Write a word without dots, and none that modules or their wrappers use themselves, e.g. "generator".'
            found.append(Problem(where=where, what="is no name for a model.", fix=fix))
        if not isinstance(model, nn.Module):
            fix = "Give the module that the training loop calls."
            found.append(Problem(where=where, what=f"is {type_of(model)}, not a torch.nn.Module.", fix=fix))
    if not models:
        fix = "Give at least one model."
        found.append(Problem(where=f"{caller}(model=...)", what="is empty: nothing would be recorded.", fix=fix))
    problems += found
    return None if found else Together(models)


def can_be_name(name: str) -> bool:
    """Whether a model can have this name: paths begin with it, and it is an attribute of the module that holds it."""
    return bool(name) and "." not in name and name not in WRAPPERS and not hasattr(_EMPTY, name)


def roots_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """What the training calls of a model: the model itself, or each of several parts of it."""
    return tuple(model.children()) if isinstance(model, (Parts, Together)) else (model,)
