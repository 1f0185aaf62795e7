"""Find and exchange values in lists, tuples, mappings and dataclasses, however deep; for any framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from functools import partial
from operator import is_, setitem
from typing import Any, TypeVar

Kind = TypeVar("Kind")

_DEEPEST = 16
"""Containers deeper than this are not looked into: they may hold themselves."""


def is_of(one: object, package: str) -> bool:
    """True if the class of an object, or one of its bases, is defined in a package or in one below it."""
    return any(f"{kind.__module__}.".startswith(f"{package}.") for kind in type(one).__mro__)


def slots_of(value: Any, slot: str, kind: type[Kind] | tuple[type[Kind], ...]) -> Iterator[tuple[str, Kind]]:
    """Yield everything of one type in `value` with its slot.

    Looks into lists, tuples, named tuples, mappings (and with them the outputs of Hugging Face) and dataclasses, 16
    containers deep. What appears twice is yielded twice.

    Args:
        value: Anything.
        slot: The slot of `value` itself. If `value` is of this type, its slot is `slot + "[0]"`, as if it were the
            only entry of a tuple, so that wrapping it in one changes no name.
        kind: The type to look for, or several.
    """
    if isinstance(value, kind):
        return iter([(f"{slot}[0]", value)])
    if type(value) is tuple and len(value) == 1 and isinstance(value[0], kind):  # as a rule
        return iter([(f"{slot}[0]", value[0])])
    if type(value) in (tuple, dict) and not value:
        return iter(())
    return _walk(value, slot, kind, 0)


def _walk(value: Any, slot: str, kind: type[Kind] | tuple[type[Kind], ...], depth: int) -> Iterator[tuple[str, Kind]]:
    if isinstance(value, kind):
        yield slot, value
        return
    if depth == _DEEPEST:
        return
    for name, entry in _entries(value):
        yield from _walk(entry, slot + name, kind, depth + 1)


def _entries(value: Any) -> Iterable[tuple[str, Any]]:
    if type(value) is tuple:  # as a rule; abstract classes are slow to ask
        return [(f"[{index}]", entry) for index, entry in enumerate(value)]
    if type(value) is dict:
        return [(_attribute(key), entry) for key, entry in value.items()]
    return _entries_of_others(value)


def _entries_of_others(value: Any) -> Iterator[tuple[str, Any]]:
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


def mapped(value: Any, kind: type[Kind], change: Callable[[Kind], Any], *, depth: int = 0) -> Any:
    """`value` with `change(one)` in place of each `one` of a type that `slots_of` finds in it.

    `value` itself if nothing changes. A container in which something changes is copied, not written to: whoever else
    holds it keeps what was there.

    Args:
        value: Anything.
        kind: The type to look for.
        change: Returns its argument to leave it as it is.
        depth: The number of containers around `value`.
    """
    if isinstance(value, kind):
        return change(value)
    if depth == _DEEPEST:
        return value
    inner = partial(mapped, kind=kind, change=change, depth=depth + 1)
    if isinstance(value, Mapping):
        return _with_changed(value, value.items(), inner, setitem)
    if isinstance(value, (list, tuple)):
        return _with_entries(value, [inner(one) for one in value])
    if is_dataclass(value) and not isinstance(value, type):
        present = ((one.name, getattr(value, one.name, None)) for one in fields(value))
        return _with_changed(value, present, inner, object.__setattr__)  # in frozen ones too
    return value


def _with_changed(
    container: Any,
    entries: Iterable[tuple[Any, Any]],
    change: Callable[[Any], Any],
    put: Callable[[Any, Any, Any], None],
) -> Any:
    changed = [(key, new) for key, entry in entries if (new := change(entry)) is not entry]
    if not changed or (isinstance(container, Mapping) and not isinstance(container, MutableMapping)):
        return container
    result = copy(container)
    for key, new in changed:
        put(result, key, new)
    return result


def _with_entries(sequence: Any, entries: list[Any]) -> Any:
    if all(map(is_, entries, sequence)):
        return sequence
    if hasattr(sequence, "_make"):  # a named tuple
        return sequence._make(entries)
    if isinstance(sequence, list):
        result = copy(sequence)
        result[:] = entries
        return result
    return type(sequence)(entries)
