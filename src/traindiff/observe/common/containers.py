"""Find what there is of one type in lists, tuples, mappings and dataclasses; of any framework."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar


def is_of(one: object, package: str) -> bool:
    """Whether its class, or one that this derives from, is defined in a package or in one below it."""
    return any(f"{kind.__module__}.".startswith(f"{package}.") for kind in type(one).__mro__)


Kind = TypeVar("Kind")

DEEPEST = 16
"""How deep containers are looked into."""


def slots_of(value: Any, slot: str, kind: type[Kind]) -> Iterator[tuple[str, Kind]]:
    """Yield everything of one type in `value` with its slot.

    Looks into lists, tuples, named tuples, mappings (with them the outputs of Hugging Face) and
    dataclasses, to a depth of 16. What is found is yielded as often as it appears.

    Args:
        value: Anything.
        slot: Slot of `value` itself. What is all of `value` has `slot + "[0]"`, as if it
            were the only entry of a tuple, so that wrapping it in one changes no name.
        kind: Type of what is looked for.
    """
    if isinstance(value, kind):
        yield f"{slot}[0]", value
    else:
        yield from _walk(value, slot, kind, 0)


def _walk(value: Any, slot: str, kind: type[Kind], depth: int) -> Iterator[tuple[str, Kind]]:
    if isinstance(value, kind):
        yield slot, value
        return
    if depth == DEEPEST:
        return
    for name, entry in _entries(value):
        yield from _walk(entry, slot + name, kind, depth + 1)


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
