"""What a script calls its models: the variables, and the attributes, that hold them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

from torch import nn

from traindiff.running.account import names_of_kinds
from traindiff.sessions.live_modules import unwrapped
from traindiff.sessions.parts import can_be_name


def named_models(models: Sequence[nn.Module], frame: FrameType | None) -> dict[str, nn.Module]:
    """Names for several models, each used once.

    Args:
        models: As the training calls them, wrapped or not.
        frame: Where it does so. The variables of `__main__` are looked at first, then those of the outermost function,
            with the attributes of what `self` is there, and so on: functions inside may call any model `model`.
    """
    scopes: list[Mapping[str, Any]] = []
    while frame is not None:
        scopes[:0] = [frame.f_locals, *_attributes(frame.f_locals)]
        frame = frame.f_back
    scopes.insert(0, vars(sys.modules["__main__"]))
    kinds = names_of_kinds([type(unwrapped(model)).__name__ for model in models])
    found: dict[str, nn.Module] = {}
    for model, kind in zip(models, kinds, strict=True):
        names = (name for scope in scopes for name in _names_in(scope, model))
        found[next((name for name in names if name not in found), kind)] = model
    return found


def _names_in(scope: Mapping[str, Any], model: nn.Module) -> list[str]:
    """Names in a scope of a model, those of the model itself before those of a wrapper around it."""
    inner = unwrapped(model)
    held = [(name, one) for name, one in list(scope.items()) if one is model or one is inner]
    usable = [(name, one) for name, one in held if _is_usable(name)]
    return [name for name, one in sorted(usable, key=lambda pair: pair[1] is not inner)]


def _is_usable(name: str) -> bool:
    return name.isidentifier() and not name.startswith("_") and name != "self" and can_be_name(name)


def _attributes(variables: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The attributes of an object that holds models, e.g. the trainer whose method runs."""
    owner = variables.get("self")
    own = getattr(owner, "__dict__", None)
    return [own] if isinstance(own, dict) and not isinstance(owner, nn.Module) else []
