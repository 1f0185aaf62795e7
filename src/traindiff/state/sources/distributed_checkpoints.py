"""Directories of torch.distributed.checkpoint: `.metadata` says which file has which box of each tensor.

FSDP's sharded state dicts and Megatron's distributed checkpoints are such directories. No process group is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

from traindiff.core.site import printable
from traindiff.core.untrusted.demands import quoted
from traindiff.core.untrusted.folder import Folder
from traindiff.state.dtypes import ITEM_BYTES
from traindiff.state.sources.pickles import MOST_PICKLE_BYTES, Record, is_shape, loaded, name_of
from traindiff.state.sources.stacked_layers import apart, is_of_megatron, without_buckets
from traindiff.state.sources.torch_files import Archive, named_tensors
from traindiff.state.stored import Bytes, Part, Place, Role, StoredTensor, check_parts, unreadable

METADATA = ".metadata"
"""The file that makes a directory one of these."""


def of_directory(folder: Folder) -> tuple[dict[str, StoredTensor], list[str]]:
    """The tensors of a directory, by name, and notes. What Megatron has stacked is taken apart.

    Raises:
        CheckpointError: The metadata are damaged or would run code, a file is missing or too short, or a box of a
            tensor is missing.
    """
    where = folder.path(METADATA)
    data = folder.read(METADATA, limit=MOST_PICKLE_BYTES)
    content = loaded(data, where=where, stored=lambda _: None)
    described, stored = _field(content, "state_dict_metadata"), _field(content, "storage_data")
    if not isinstance(described, Mapping) or not isinstance(stored, Mapping):
        raise unreadable(where, "it has no state_dict_metadata, or no storage_data")
    places: dict[tuple[str, tuple[int, ...]], Record] = {}
    for index, place in stored.items():
        name, offset = _field(index, "fqn"), _field(index, "offset")
        if isinstance(name, str) and is_shape(offset):
            places[name, offset] = place
    reader = _Reader(folder, places)
    tensors = {name: one for name, one in described.items() if isinstance(name, str) and _is_tensor(one)}
    found = named_tensors(_nested(tensors, _field(content, "planner_data"), where), where, reader.tensor)
    if not is_of_megatron(folder):
        return found, []
    plain, notes = without_buckets(found)
    return apart(plain), notes


def _field(value: Any, name: str) -> Any:
    return value.attribute(name) if isinstance(value, Record) else None


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Record) and value.name.endswith("TensorStorageMetadata")


def _nested(tensors: Mapping[str, Record], paths: Any, where: str) -> dict[Any, Any]:
    """The state dict that was saved, with pairs of name and description in place of its tensors.

    Raises:
        CheckpointError: Two tensors have one place in it.
    """
    made: dict[Any, Any] = {}
    for name, one in tensors.items():
        path = paths.get(name) if isinstance(paths, Mapping) else None
        keys: tuple[Any, ...] = (name,)
        if isinstance(path, tuple) and path and all(isinstance(key, str | int) for key in path):
            keys = path
        inner = made
        for key in keys[:-1]:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                break
        if not isinstance(inner, dict) or keys[-1] in inner:
            raise unreadable(where, f"the path of {quoted(printable(name))} leads to another tensor, too")
        inner[keys[-1]] = _Described(name, one)
    return made


class _Described:
    """A tensor of the metadata, under the name that it has there."""

    __slots__ = ("content", "name")

    def __init__(self, name: str, content: Record) -> None:
        self.name = name
        self.content = content


class _Reader:
    """Makes tensors of what the metadata say.

    Args:
        folder: The directory.
        places: The description of the place of each box, by the tensor's name and the offset of the box.
    """

    def __init__(self, folder: Folder, places: Mapping[tuple[str, tuple[int, ...]], Record]) -> None:
        self._folder = folder
        self._places = places
        self._size = cache(folder.size)

    def tensor(self, value: Any, name: str, role: Role) -> StoredTensor | None:
        """The tensor; None for a value that describes none."""
        if not isinstance(value, _Described):
            return None
        where = self._folder.path(METADATA)
        shape, dtype = _field(value.content, "size"), _dtype(_field(value.content, "properties"))
        chunks = _field(value.content, "chunks")
        if dtype not in ITEM_BYTES or not is_shape(shape) or not isinstance(chunks, list):
            raise unreadable(where, f"the tensor {quoted(value.name)} is not described as torch does it")
        parts = tuple(self._part(value.name, one, dtype) for one in chunks)
        found = StoredTensor(name=name, dtype=dtype, shape=shape, parts=parts, role=role)
        return check_parts(where, found)

    def _part(self, name: str, chunk: Any, dtype: str) -> Part:
        offset, shape = _field(chunk, "offsets"), _field(chunk, "sizes")
        place = self._places.get((name, offset)) if is_shape(offset) else None
        where = self._folder.path(METADATA)
        if not is_shape(shape) or place is None:
            at = list(offset) if is_shape(offset) else "an unknown offset"
            raise unreadable(where, f"it does not say where the part of {quoted(name)} at {at} is")
        file, first, count = (_field(place, key) for key in ("relative_path", "offset", "length"))
        if not isinstance(file, str) or type(first) is not int or type(count) is not int or min(first, count) < 0:
            raise unreadable(where, f"it does not say where the part of {quoted(name)} at {list(offset)} is")
        if _field(place, "transform_descriptors"):
            raise unreadable(where, f"the part of {quoted(name)} at {list(offset)} is compressed")
        if not self._folder.exists(file):
            raise unreadable(where, f"it says that {quoted(name)} is in {quoted(file)}, which is not there")
        if first + count > self._size(file):
            ends = f"it has {self._size(file)} bytes, and {quoted(name)} ends at byte {first + count}"
            raise unreadable(self._folder.path(file), ends)
        content = Bytes(folder=self._folder, name=file, offset=first, count=count)
        boxed = (offset, shape) if shape else ((0,), (1,))
        return Part(offset=boxed[0], shape=boxed[1], find=cache(partial(_found, content, name, tuple(shape), dtype)))


def _found(content: Bytes, name: str, shape: tuple[int, ...], dtype: str) -> Place:
    """The place of the elements of a part, which is a file of `torch.save` inside of a file.

    Raises:
        CheckpointError: It is none, or holds another tensor than the metadata say.
    """
    where = content.folder.path(content.name)
    archive = Archive(content, where)
    tensor = archive.tensor(archive.value, name)
    if tensor is None or tensor.shape != shape or tensor.dtype != dtype:
        raise unreadable(where, f"the part of {quoted(name)} in it is not the one that {quoted(METADATA)} describes")
    return tensor.parts[0].find()


def _dtype(properties: Any) -> str:
    state = properties.state if isinstance(properties, Record) else None
    given = state[0] if isinstance(state, tuple) and state else _field(properties, "dtype")
    return name_of(given).removeprefix("torch.")
