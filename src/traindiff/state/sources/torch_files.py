"""Files of `torch.save`: an archive with a pickle, which is read as data, and the uncompressed elements of storages."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from traindiff.core.site import printable
from traindiff.core.untrusted.demands import quoted
from traindiff.core.untrusted.folder import Folder
from traindiff.state.dtypes import ITEM_BYTES
from traindiff.state.sources.pickles import Record, loaded, name_of
from traindiff.state.stored import Bytes, Part, Place, Role, StoredTensor, unreadable

MOST_ENTRIES = 1 << 20
"""Limit for the files in an archive: one per storage."""

MOST_VALUES = 1 << 22
"""Limit for the values in the containers of a pickle, each counted where it is."""

MOST_DEPTH = 64
"""Limit for nested containers."""

_STORAGES: Mapping[str, str] = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "UntypedStorage": "uint8",
}  # fmt: skip

_LOCAL_HEADER_BYTES = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A storage: the file of the archive, and its dtype.

    Attributes:
        key: Its name in the archive.
        dtype: Of its elements; `uint8` if it has none.
        count: Number of elements.
    """

    key: str
    dtype: str
    count: int


class _File(io.RawIOBase):
    """A part of a file, for `zipfile`."""

    def __init__(self, content: Bytes) -> None:
        self._content = content
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = (0, self._place, self._content.count)[whence]
        self._place = max(0, start + offset)
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._content.count - self._place))
        buffer[:count] = self._content.read(self._place, count).tobytes()
        self._place += count
        return count


class Archive:
    """A file of `torch.save`.

    Args:
        content: The bytes of the archive, which may be a part of a file.
        where: The file, for messages.

    Attributes:
        value: The object that was saved, as data.

    Raises:
        CheckpointError: It is no such file, is damaged, or would run code.
    """

    def __init__(self, content: Bytes, where: str) -> None:
        self._content = content
        self.where = where
        try:
            self._zip = zipfile.ZipFile(io.BufferedReader(_File(content), 1 << 16))
        except (zipfile.BadZipFile, ValueError, OverflowError, NotImplementedError, struct.error) as error:
            raise unreadable(where, self._no_archive(error)) from None
        entries = self._zip.infolist()
        if len(entries) > MOST_ENTRIES:
            raise unreadable(where, f"it has {len(entries)} storages, and may have {MOST_ENTRIES}")
        self._entries = {one.filename: one for one in entries}
        pickled = next((name for name in self._entries if name.endswith("/data.pkl")), None)
        if pickled is None:
            raise unreadable(where, "it is an archive, and not one of torch.save: it has no data.pkl")
        if self._entry(pickled.replace("data.pkl", "constants.pkl")) is not None:
            raise unreadable(where, "it is a TorchScript archive, which is code")
        self._root = pickled.removesuffix("data.pkl")
        order = self._entry(f"{self._root}byteorder")
        if order is not None and order.count < 16 and order.read(0, order.count).tobytes() == b"big":
            raise unreadable(where, "it was written on a machine with another byte order")
        data = self._bytes_of(pickled)
        self.value = loaded(data.read(0, data.count).tobytes(), where=where, stored=self._stored)

    def _no_archive(self, error: Exception) -> str:
        start = self._content.read(0, min(2, self._content.count)).tobytes()
        if start[:1] == b"\x80":
            return (
                "it is another pickle, or in the format that torch.save had before version 1.6; only archives are read"
            )
        return f"it is no file of torch.save, or is cut off ({str(error)[:80]})"

    def _entry(self, name: str) -> Bytes | None:
        return self._bytes_of(name) if name in self._entries else None

    def _bytes_of(self, name: str) -> Bytes:
        """Where a file of the archive is.

        Raises:
            CheckpointError: It is compressed, or ends behind the archive.
        """
        entry = self._entries[name]
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise unreadable(self.where, f"{quoted(name)} is compressed, which torch.save never does")
        if entry.header_offset < 0 or entry.file_size < 0:
            raise unreadable(self.where, f"{quoted(name)} does not lie in the file")
        header = self._content.read(entry.header_offset, _LOCAL_HEADER_BYTES)
        names = int.from_bytes(header[26:28].tobytes(), "little") + int.from_bytes(header[28:30].tobytes(), "little")
        first = entry.header_offset + _LOCAL_HEADER_BYTES + names
        if first + entry.file_size > self._content.count:
            raise unreadable(self.where, f"{quoted(name)} ends behind the end of the file")
        content = self._content
        return Bytes(folder=content.folder, name=content.name, offset=content.offset + first, count=entry.file_size)

    def _stored(self, key: Any) -> Storage:
        """What stands for a storage."""
        if not isinstance(key, tuple) or len(key) != 5 or key[0] != "storage" or not isinstance(key[4], int):
            raise unreadable(self.where, "it names a storage in a way that torch.save does not")
        dtype = _STORAGES.get(name_of(key[1]).rpartition(".")[2])
        name, count = str(key[2]), key[4]
        entry = self._entries.get(f"{self._root}data/{name}")
        if dtype is None or entry is None:
            raise unreadable(self.where, f"its storage {quoted(name)} is missing, or of an unknown dtype")
        if count < 0 or count * ITEM_BYTES[dtype] > entry.file_size:
            raise unreadable(
                self.where, f"its storage {quoted(name)} has {entry.file_size} bytes, too few for {count} of {dtype}"
            )
        return Storage(key=name, dtype=dtype, count=count)

    def tensor(self, value: Any, name: str, role: Role = "parameter") -> StoredTensor | None:
        """The tensor that a value describes; None if it describes none.

        Raises:
            CheckpointError: It lies outside of its storage.
        """
        if not isinstance(value, Record):
            return None
        last = value.name.rpartition(".")[2]
        if last in ("_rebuild_parameter", "_rebuild_parameter_with_state") and value.arguments:
            return self.tensor(value.arguments[0], name, role)
        if last == "_rebuild_from_type_v2" and len(value.arguments) > 2 and isinstance(value.arguments[2], tuple):
            return self.tensor(Record(name_of(value.arguments[0]), value.arguments[2]), name, role)
        if last not in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3") or len(value.arguments) < 4:
            return None
        storage, offset, shape, strides, *more = value.arguments
        given = name_of(more[2]).removeprefix("torch.") if last.endswith("v3") and len(more) > 2 else ""
        return self._placed(name, role, storage, offset, shape, strides, given)

    def _placed(
        self, name: str, role: Role, storage: Any, offset: Any, shape: Any, strides: Any, given: str
    ) -> StoredTensor:
        whole = (offset, *shape, *strides) if isinstance(shape, tuple) and isinstance(strides, tuple) else ("",)
        fits = all(type(one) is int and one >= 0 for one in whole) and isinstance(storage, Storage)
        if not fits or len(shape) != len(strides) or (given or storage.dtype) not in ITEM_BYTES:
            raise unreadable(self.where, f"the tensor {quoted(name)} is not described as torch.save does it")
        dtype = given or storage.dtype
        size = ITEM_BYTES[dtype]
        room = storage.count * ITEM_BYTES[storage.dtype] // size
        span = 1 + sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
        if prod(shape) and (offset + span > room or prod(shape) > room):
            raise unreadable(
                self.where, f"the tensor {quoted(name)} of shape {list(shape)} lies outside of its storage"
            )
        if not shape:
            shape_of_part, steps = (1,), None
        else:
            plain = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
            shape_of_part = tuple(shape)
            same = all(a == b or n == 1 for a, b, n in zip(strides, plain, shape, strict=True))
            steps = None if same or not prod(shape) else tuple(strides)
        find = partial(self._place, f"{self._root}data/{storage.key}", offset * size, steps)
        part = Part(offset=(0,) * len(shape_of_part), shape=shape_of_part, find=find)
        return StoredTensor(name=name, dtype=dtype, shape=tuple(shape), parts=(part,), role=role)

    def _place(self, name: str, first: int, strides: tuple[int, ...] | None) -> Place:
        return Place(content=self._bytes_of(name).after(first), strides=strides)


def archive_of(folder: Folder, name: str) -> Archive:
    """The archive in a file.

    Raises:
        CheckpointError: It cannot be read.
    """
    content = Bytes(folder=folder, name=name, offset=0, count=folder.size(name))
    return Archive(content, folder.path(name))


Found = Callable[[Any, str, Role], StoredTensor | None]
"""Makes a tensor of a value in a container, given its name and role; None if it is none."""

MODELS = ("model", "state_dict", "model_state_dict", "module", "model_state", "net", "network", "params")
"""Keys under which people save a model's state dict beside other things. The first that is there counts."""


def named_tensors(value: Any, where: str, found: Found) -> dict[str, StoredTensor]:
    """The tensors in nested containers, by name.

    Parameters keep the names that they have in the model's state dict; a name of anything else is its path from the
    outermost container. What lies below a key with "optim" in it is of an optimizer.

    Args:
        value: Containers of what `found` takes.
        where: The file, for messages.
        found: Makes the tensors.

    Raises:
        CheckpointError: There are too many values, or they are nested too deep.
    """
    tensors: dict[str, StoredTensor] = {}
    model = value
    prefix: list[str] = []
    while (key := _model_key(model)) is not None:
        prefix.append(key)
        model = model[key]
    inside = ".".join(prefix)
    for path, one in _leaves(value, where):
        own = path.removeprefix(f"{inside}.") if inside and path.startswith(f"{inside}.") else path
        is_own = not inside or own != path
        role: Role = "optimizer" if "optim" in path.partition(".")[0] else "parameter" if is_own else "other"
        name = printable(own if role == "parameter" else path)
        tensor = found(one, name, role)
        if tensor is not None:
            tensors[name] = tensor
    return tensors


def _model_key(value: Any) -> str | None:
    if not isinstance(value, Mapping):
        return None
    return next((key for key in MODELS if isinstance(value.get(key), Mapping)), None)


def _leaves(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    count = 0
    stack: list[tuple[str, Any, int]] = [("", value, 0)]
    while stack:
        path, one, depth = stack.pop()
        count += 1
        if count > MOST_VALUES or depth > MOST_DEPTH:
            raise unreadable(where, f"it has more than {MOST_VALUES} values, or containers nested {MOST_DEPTH} deep")
        inner: list[tuple[str, Any, int]] = []
        if isinstance(one, Mapping):
            inner = [(_joined(path, key), below, depth + 1) for key, below in one.items()]
        elif isinstance(one, list | tuple):
            inner = [(f"{path}[{number}]", below, depth + 1) for number, below in enumerate(one)]
        else:
            yield path, one
        stack += reversed(inner)


def _joined(path: str, key: Any) -> str:
    if isinstance(key, int):
        return f"{path}[{key}]"
    return f"{path}.{key}" if path else str(key)


def of_file(folder: Folder, name: str) -> dict[str, StoredTensor]:
    """The tensors of a file of `torch.save`, by name.

    Raises:
        CheckpointError: It is damaged, or would run code.
    """
    archive = archive_of(folder, name)
    return named_tensors(archive.value, archive.where, archive.tensor)
