"""Find the tensors in whatever a module takes or returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, float64, tensor

from traindiff.observe.common.containers import DEEPEST, slots_of


def as_tensor(number: float | Tensor) -> Tensor:
    """A tensor without axes: float64 on the CPU, or the given tensor with one element, where it is, detached."""
    if isinstance(number, Tensor):
        return number.detach().reshape(())
    return tensor(float(number), dtype=float64, device="cpu")


def tensors(value: Any, slot: str) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in `value` with its slot.

    Looks into lists, tuples, named tuples, mappings (with them the outputs of Hugging Face) and
    dataclasses, to a depth of 16. A tensor that is found is yielded as often as it appears.

    Args:
        value: Anything.
        slot: Slot of `value` itself. A tensor that is all of `value` has `slot + "[0]"`, as if it
            were the only entry of a tuple, so that wrapping it in one changes no name.
    """
    return slots_of(value, slot, Tensor)


def replaced(value: Any, by_id: Mapping[int, Tensor]) -> Any:
    """`value` with other tensors in it, in containers of the same types; `value` itself where nothing changes.

    Containers in which something changes are copied, not written to: whoever else holds them keeps
    the tensors that were there.

    Args:
        value: Anything in which `tensors` finds tensors.
        by_id: The new tensors by the ids of those whose places they take.
    """
    return _replaced(value, by_id, 0)


def _replaced(value: Any, by_id: Mapping[int, Tensor], depth: int) -> Any:
    if isinstance(value, Tensor):
        return by_id.get(id(value), value)
    if depth == DEEPEST:
        return value
    if isinstance(value, Mapping):
        return _with_items(value, {key: _replaced(entry, by_id, depth + 1) for key, entry in value.items()})
    if isinstance(value, (list, tuple)):
        return _with_entries(value, [_replaced(entry, by_id, depth + 1) for entry in value])
    if is_dataclass(value) and not isinstance(value, type):
        present = {one.name: getattr(value, one.name, None) for one in fields(value)}
        return _with_fields(value, {name: _replaced(entry, by_id, depth + 1) for name, entry in present.items()})
    return value


def _with_items(mapping: Mapping[Any, Any], items: Mapping[Any, Any]) -> Any:
    changed = {key: entry for key, entry in items.items() if entry is not mapping[key]}
    if not changed or not isinstance(mapping, MutableMapping):
        return mapping
    result = copy(mapping)
    for key, entry in changed.items():
        result[key] = entry
    return result


def _with_entries(sequence: Any, entries: list[Any]) -> Any:
    if all(new is old for new, old in zip(entries, sequence, strict=True)):
        return sequence
    if hasattr(sequence, "_make"):  # a named tuple
        return sequence._make(entries)
    if isinstance(sequence, list):
        result = copy(sequence)
        result[:] = entries
        return result
    return type(sequence)(entries)


def _with_fields(value: Any, new: Mapping[str, Any]) -> Any:
    changed = {name: entry for name, entry in new.items() if entry is not getattr(value, name, None)}
    if not changed:
        return value
    result = copy(value)
    for name, entry in changed.items():
        object.__setattr__(result, name, entry)  # frozen ones too
    return result
