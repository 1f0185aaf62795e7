"""The settings of an object as texts: its class, and its attributes that are plain values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from traindiff.core.torch_compat.training import is_fully_sharded

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_MOST_SETTINGS = 40
"""Settings of one module that are recorded, in the order in which the module was given them."""

_LONGEST = 200
_CONFIGURATION = re.compile("^([a-z]+_)?(config|cfg|conf|args|hparams|options|opts|settings)$")
_OURS = "traindiff."


def settings_of(thing: object) -> dict[str, str]:
    """Settings of a module or a scheduler: its class, and attributes that are numbers, texts, flags, dtypes, or tuples.

    A `forward` that was set on the object counts too, by the name of the function. So do the plain values of an object
    that is named as a configuration, after the object's own (`config.n_head`). Private attributes do not count.
    """
    kind = type(thing)
    if isinstance(thing, nn.Module) and is_fully_sharded(thing):
        kind = kind.__mro__[2]  # after the class that FSDP2 makes, and its own
    found = {"class": f"{kind.__module__}.{kind.__qualname__}"}
    for name, value in vars(thing).items():
        if len(found) == _MOST_SETTINGS:
            break
        if name == "forward":
            if function := _name_of(value):
                found[name] = function
        elif not name.startswith("_") and _is_plain(value):
            found[name] = repr(value)[:_LONGEST]
    for name, value in vars(thing).items():
        for part, held in _configuration(name, value).items():
            if len(found) < _MOST_SETTINGS and isinstance(part, str) and not part.startswith("_") and _is_plain(held):
                found[f"{name}.{part}"] = repr(held)[:_LONGEST]
    return found


def _configuration(name: str, value: object) -> Mapping[Any, Any]:
    """The attributes or items of an object that is named as a configuration; empty for anything else."""
    if not _CONFIGURATION.search(name) or isinstance(value, (nn.Module, torch.Tensor, type)):
        return {}
    return value if isinstance(value, dict) else getattr(value, "__dict__", {})


def _is_plain(value: object) -> bool:
    parts = value if isinstance(value, (tuple, list)) else (value,)
    return len(parts) <= _MOST_SETTINGS and all(type(one) in _PLAIN for one in parts)


def _name_of(function: Any) -> str:
    """Module and name of a function; empty for traindiff's own."""
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", type(function).__qualname__)
    return "" if str(module).startswith(_OURS) else f"{module}.{name}"
