"""Tensors as pickles of torch describe them: a storage, the first element, a shape and strides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

from traindiff.core.untrusted.demands import quoted
from traindiff.errors import CheckpointError
from traindiff.state.dtypes import ITEM_BYTES
from traindiff.state.sources.pickles import Record, is_shape, name_of
from traindiff.state.stored import Part, Place, Role, StoredTensor, unreadable

_STORAGES: Mapping[str, str] = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "UntypedStorage": "uint8",
}  # fmt: skip

_OTHERS: Mapping[str, str] = {
    "_rebuild_sparse_tensor": "is sparse", "_rebuild_sparse_csr_tensor": "is sparse",
    "_rebuild_qtensor": "is quantized", "_rebuild_nested_tensor": "is nested",
    "_rebuild_meta_tensor_no_storage": "was on the meta device, without elements",
}  # fmt: skip
"""Functions of torch that make other tensors, and what these are."""


MOST_REPEATED_BYTES = 1 << 30
"""Limit for the bytes of the tensors of a file that have more elements than their storages, as `expand` makes them."""


class Repeated:
    """Bytes that the tensors of one file may still have in all beyond those of their storages."""

    def __init__(self) -> None:
        self._left = MOST_REPEATED_BYTES

    def takes(self, count: int) -> bool:
        """Whether as many more are allowed."""
        self._left -= count
        return self._left >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Elements that tensors lie in.

    Attributes:
        key: Its name in the file.
        dtype: Of its elements; `uint8` if it has none.
        count: Number of elements.
        find: Finds the place of its first element.
        repeated: What tensors of its file may have beyond their storages.
    """

    key: str
    dtype: str
    count: int
    find: Callable[[], Place]
    repeated: Repeated


def storage_dtype(kind: Any) -> str | None:
    """The dtype of a class of storages; None if it is none."""
    return _STORAGES.get(name_of(kind).rpartition(".")[2])


def is_storage_key(key: Any) -> bool:
    """True for what pickles of torch keep of a storage: its class, its name, its device and its number of elements."""
    fits = isinstance(key, tuple) and len(key) in (5, 6) and key[0] == "storage"
    return fits and isinstance(key[2], str) and type(key[4]) is int


def described_tensor(value: Any, name: str, role: Role, where: str) -> StoredTensor | None:
    """The tensor that a value of a pickle describes; None if it describes none.

    Args:
        value: Any value.
        name: The name of the tensor.
        role: Its role.
        where: The file, for messages.

    Raises:
        CheckpointError: It lies outside of its storage.
    """
    if not isinstance(value, Record):
        return None
    last = value.name.rpartition(".")[2]
    if last in ("_rebuild_parameter", "_rebuild_parameter_with_state") and value.arguments:
        return described_tensor(value.arguments[0], name, role, where)
    if last == "_rebuild_from_type_v2" and len(value.arguments) > 2 and isinstance(value.arguments[2], tuple):
        return described_tensor(Record(name_of(value.arguments[0]), value.arguments[2]), name, role, where)
    if last in _OTHERS:
        raise unreadable(where, f"{quoted(name)} is a tensor that {_OTHERS[last]}, and only plain ones are read")
    if last not in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3") or len(value.arguments) < 4:
        return None
    storage, offset, shape, strides, *more = value.arguments
    given = name_of(more[2]).removeprefix("torch.") if last.endswith("v3") and len(more) > 2 else ""
    return _placed(name, role, where, storage, offset, shape, strides, given)


def _placed(
    name: str, role: Role, where: str, storage: Any, offset: Any, shape: Any, strides: Any, given: str
) -> StoredTensor:
    fits = all(map(is_shape, ((offset,), shape, strides))) and isinstance(storage, Storage)
    if not fits or len(shape) != len(strides) or (given or storage.dtype) not in ITEM_BYTES:
        raise unreadable(where, f"the tensor {quoted(name)} is not described as torch.save does it")
    dtype = given or storage.dtype
    size = ITEM_BYTES[dtype]
    room = storage.count * ITEM_BYTES[storage.dtype] // size
    span = 1 + sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
    if prod(shape) and offset + span > room:
        raise unreadable(where, f"the tensor {quoted(name)} of shape {list(shape)} lies outside of its storage")
    if prod(shape) > room and not storage.repeated.takes((prod(shape) - room) * size):
        what = f"the tensor {quoted(name)} of shape {list(shape)} repeats the elements of a storage of {room}"
        raise CheckpointError(
            f"{where} cannot be read: {what}, and all that do so may have {MOST_REPEATED_BYTES >> 30} GiB more than "
            "they store. Leave it out, or save its elements with .contiguous()."
        )
    if not shape:
        shape_of_part, steps = (1,), None
    else:
        plain = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        shape_of_part = tuple(shape)
        same = all(a == b or n == 1 for a, b, n in zip(strides, plain, shape, strict=True))
        steps = None if same or not prod(shape) else tuple(strides)
    find = partial(_place, storage, offset * size, steps)
    part = Part(offset=(0,) * len(shape_of_part), shape=shape_of_part, find=find)
    return StoredTensor(name=name, dtype=dtype, shape=tuple(shape), parts=(part,), role=role)


def _place(storage: Storage, first: int, strides: tuple[int, ...] | None) -> Place:
    place = storage.find()
    return replace(place, content=place.content.after(first), strides=strides)
