"""Memory to which nothing was written yet: its bits are those of whatever was there before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from traindiff.taps.nested import tensors
from traindiff.taps.operator_tensors import Schema


class UndefinedMemory:
    """Follows, from operator to operator, which storages hold nothing that two runs could have in common.

    A storage that operators write to part by part counts as undefined until as much was written as it holds.
    """

    def __init__(self) -> None:
        self._unwritten: dict[int, float] = {}  # bytes to which nothing was written, by address

    def __bool__(self) -> bool:
        return bool(self._unwritten)

    def note(self, schema: Schema, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """An operator has run."""
        given = {_address(tensor) for _, tensor in tensors((args, dict(kwargs)), "")}
        if schema.undefined:
            for _, tensor in tensors(output, ""):
                self._unwritten[_address(tensor)] = tensor.untyped_storage().nbytes()
            return
        for name, value in (*zip(schema.arguments, args, strict=False), *kwargs.items()):
            for _, tensor in tensors(value, "") if name in schema.written else ():
                self._wrote(tensor)
        for _, tensor in tensors(output, ""):
            if _address(tensor) not in given:  # neither a view nor written in place: new, whatever was there before
                self._unwritten.pop(_address(tensor), None)
        if schema.workspaces and isinstance(output, (list, tuple)):
            for place in schema.workspaces:
                if place < len(output) and isinstance(output[place], Tensor):
                    self._unwritten[_address(output[place])] = float("inf")

    def is_undefined(self, tensor: Tensor) -> bool:
        """Whether a tensor has elements to which nothing was written, as far as is known."""
        return bool(self._unwritten) and tensor.numel() > 0 and _address(tensor) in self._unwritten

    def clear(self) -> None:
        """What was in memory is gone."""
        self._unwritten.clear()

    def _wrote(self, tensor: Tensor) -> None:
        address = _address(tensor)
        if address in self._unwritten:
            self._unwritten[address] -= tensor.numel() * tensor.element_size()
            if self._unwritten[address] <= 0:
                del self._unwritten[address]


def _address(tensor: Tensor) -> int:
    """Where a tensor's storage is; that of the object, for a tensor that has none."""
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (NotImplementedError, RuntimeError):
        return id(tensor)
