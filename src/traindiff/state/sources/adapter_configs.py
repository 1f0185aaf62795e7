"""What PEFT writes beside an adapter: the factor by which the adapter is to be multiplied."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from traindiff.core.untrusted.demands import FLAG, NUMBER, demanded, mapped, nullable, parse, shaped
from traindiff.core.untrusted.folder import Folder
from traindiff.state.stored import unreadable

NAME = "adapter_config.json"

_MOST_BYTES = 1 << 22

_CONFIG = shaped(
    {}, {"lora_alpha": nullable(NUMBER), "use_rslora": nullable(FLAG), "alpha_pattern": nullable(mapped(NUMBER))}
)

Scale = Callable[[str, int], float | None]
"""The factor for a weight, by its name and the rank of its adapter; None if it is not known."""


def scale_beside(folder: Folder) -> Scale | None:
    """The factors that the configuration of an adapter in a directory says; None if it says none.

    Raises:
        CheckpointError: The file is damaged.
    """
    if not folder.exists(NAME):
        return None
    where = folder.path(NAME)
    content = parse(folder.read(NAME, limit=_MOST_BYTES), where=where, refuse=unreadable, most_bytes=_MOST_BYTES)
    demanded(content, _CONFIG, where=where, refuse=unreadable)
    alpha = content.get("lora_alpha")
    if alpha is None:
        return None
    patterns: Mapping[str, Any] = content.get("alpha_pattern") or {}

    def scale(weight: str, rank: int) -> float | None:
        module = weight.removesuffix(".weight")
        if any(not set(key) <= _PLAIN for key in patterns):
            return None  # regular expressions
        own = next((value for key, value in patterns.items() if f".{module}".endswith(f".{key}")), alpha)
        return float(own) / (math.sqrt(rank) if content.get("use_rslora") else rank)

    return scale


_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
