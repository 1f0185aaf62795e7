"""Find the tensors in whatever a module takes or returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

_DEEPEST = 16


def tensors(value: Any, slot: str) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in `value` with its slot.

    Looks into lists, tuples, named tuples, mappings (with them the outputs of Hugging Face) and
    dataclasses, to a depth of 16. A tensor that is found is yielded as often as it appears.

    Args:
        value: Anything.
        slot: Slot of `value` itself. A tensor that is all of `value` has `slot + "[0]"`, as if it
            were the only entry of a tuple, so that wrapping it in one changes no name.
    """
    if isinstance(value, Tensor):
        yield f"{slot}[0]", value
    else:
        yield from _walk(value, slot, 0)


def _walk(value: Any, slot: str, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield slot, value
        return
    if depth == _DEEPEST:
        return
    for name, entry in _entries(value):
        yield from _walk(entry, slot + name, depth + 1)


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((_attribute(key), entry) for key, entry in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((f".{name}", getattr(value, name)) for name in value._fields)
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", entry) for index, entry in enumerate(value))
    elif is_dataclass(value) and not isinstance(value, type):
        yield from ((f".{one.name}", getattr(value, one.name, None)) for one in fields(value))


def _attribute(key: object) -> str:
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"
