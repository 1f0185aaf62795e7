"""Files of `torch.save`: an archive with a pickle, which is read as data, and the uncompressed elements of storages."""

from __future__ import annotations

import re
import reprlib
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from traindiff.core.site import printable
from traindiff.core.untrusted.demands import quoted
from traindiff.core.untrusted.folder import Folder
from traindiff.errors import CheckpointError
from traindiff.state.dtypes import ITEM_BYTES
from traindiff.state.sources.legacy_torch_files import START, LegacyFile
from traindiff.state.sources.pickles import check_length, loaded
from traindiff.state.sources.readable import readable
from traindiff.state.sources.torch_tensors import Repeated, Storage, described_tensor, is_storage_key, storage_dtype
from traindiff.state.stored import Bytes, Place, Role, Seal, StoredTensor, unreadable

MOST_ENTRIES = 1 << 20
"""Limit for the files in an archive: one per storage."""

MOST_VALUES = 1 << 22
"""Limit for the values in the containers of a pickle, each counted where it is."""

MOST_DEPTH = 64
"""Limit for nested containers."""

MOST_NAME = 1 << 12
"""Limit for the characters of a name: the keys of all containers of a tensor."""

MOST_NAMES = 1 << 28
"""Limit for the characters of all names of a file."""

_SHORT = reprlib.Repr()
_SHORT.maxtuple = _SHORT.maxfrozenset = MOST_DEPTH
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = MOST_NAME
"""Writes keys that are no texts; tuples may have long texts in them many times."""

_LOCAL_HEADER_BYTES = 30


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
        self._repeated = Repeated()
        self.where = where
        try:
            self._zip = zipfile.ZipFile(readable(content))
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
            raise CheckpointError(
                f"{where} is a TorchScript archive, which is code. If you trust it, save what "
                "torch.jit.load(...).state_dict() returns."
            )
        self._root = pickled.removesuffix("data.pkl")
        order = self._entry(f"{self._root}byteorder")
        if order is not None and order.count < 16 and order.read(0, order.count).tobytes() == b"big":
            raise unreadable(where, "it was written on a machine with another byte order")
        described = self._bytes_of(pickled)
        check_length(described.count, where)
        data = described.read(0, described.count).tobytes()
        checksum = self._entries[pickled].CRC
        if checksum and zlib.crc32(data) != checksum:
            raise unreadable(where, f"{quoted(pickled)} does not have the checksum that the file has for it")
        self.value = loaded(data, where=where, stored=self._stored)

    def _no_archive(self, error: Exception) -> str:
        start = self._content.read(0, min(2, self._content.count)).tobytes()
        if start[:1] == b"\x80":
            return "it is a pickle that torch.save has not written"
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
        if not is_storage_key(key) or len(key) != 5:
            raise unreadable(self.where, "it names a storage in a way that torch.save does not")
        dtype, name, count = storage_dtype(key[1]), key[2], key[4]
        entry = self._entries.get(f"{self._root}data/{name}")
        if dtype is None or entry is None:
            raise unreadable(self.where, f"its storage {quoted(name)} is missing, or of an unknown dtype")
        if count < 0 or count * ITEM_BYTES[dtype] > entry.file_size:
            raise unreadable(
                self.where, f"its storage {quoted(name)} has {entry.file_size} bytes, too few for {count} of {dtype}"
            )
        find = partial(self._place, entry.filename)
        return Storage(key=name, dtype=dtype, count=count, find=find, repeated=self._repeated)

    def tensor(self, value: Any, name: str, role: Role = "parameter") -> StoredTensor | None:
        """The tensor that a value describes; None if it describes none.

        Raises:
            CheckpointError: It lies outside of its storage.
        """
        return described_tensor(value, name, role, self.where)

    def _place(self, name: str) -> Place:
        """The place of a file of the archive."""
        content = self._bytes_of(name)
        checksum = self._entries[name].CRC
        return Place(content=content, seal=Seal(content=content, checksum=checksum) if checksum else None)


TorchFile = Archive | LegacyFile


def archive_of(folder: Folder, name: str) -> TorchFile:
    """What `torch.save` has written into a file, today or before version 1.6.

    Raises:
        CheckpointError: It cannot be read.
    """
    content = Bytes(folder=folder, name=name, offset=0, count=folder.size(name))
    is_old = content.read(0, min(len(START), content.count)).tobytes() == START
    return (LegacyFile if is_old else Archive)(content, folder.path(name))


_OF_OPTIMIZER = re.compile(r"[^.]*optim", re.ASCII)
"""How keys of containers begin in which an optimizer's state is."""

_CHAINED = re.compile(r"chained_\d+", re.ASCII)
"""Keys under which Megatron has several optimizers."""

_FLAT = re.compile(r"(?:chained_\d+\.)?optimizer\.(?:state|param_groups|distributed)\b", re.ASCII)
"""How paths to an optimizer's state begin where it was saved without containers, as Megatron does it."""

Found = Callable[[Any, str, Role], StoredTensor | None]
"""Makes a tensor of a value in a container, given its name and role; None if it is none."""

MODELS = ("model", "state_dict", "model_state_dict", "module", "model_state", "net", "network", "params")
"""Keys under which people save a model's state dict beside other things. The first that is there counts."""


def named_tensors(value: Any, where: str, found: Found) -> dict[str, StoredTensor]:
    """The tensors in nested containers, by name.

    Parameters keep the names that they have in the model's state dict; a name of anything else is its path from the
    outermost container. What lies in a container whose key has "optim" in it is of an optimizer. Where two get one
    name, the model's keeps it, and the other's is that of all its keys, with a slash between them.

    Args:
        value: Containers of what `found` takes.
        where: The file, for messages.
        found: Makes the tensors.

    Raises:
        CheckpointError: There are too many values, they are nested too deep, or two tensors cannot be told apart.
    """
    tensors: list[tuple[tuple[str, ...], StoredTensor]] = []
    model = value
    prefix: list[str] = []
    while len(prefix) <= MOST_DEPTH and (key := _model_key(model)) is not None:  # a dict may hold itself
        prefix.append(key)
        model = model[key]
    inside = ".".join(prefix)
    for path, keys, one in _leaves(value, where):
        own = path.removeprefix(f"{inside}.") if inside and path.startswith(f"{inside}.") else path
        is_own = not inside or own != path
        role: Role = "optimizer" if _is_of_optimizer(path, keys) else "parameter" if is_own else "other"
        tensor = found(one, printable(own if role == "parameter" else path), role)
        if tensor is not None:
            tensors.append((keys, tensor))
    by_name = {tensor.name: tensor for _, tensor in tensors}
    return by_name if len(by_name) == len(tensors) else _told_apart(tensors, where)


def _is_of_optimizer(path: str, keys: Sequence[str]) -> bool:
    """Whether the containers of a value are an optimizer's: a parameter's own name may have any words in it."""
    containers = keys[:-1]
    if containers and _CHAINED.fullmatch(containers[0]):
        containers = containers[1:]
    return bool((containers and _OF_OPTIMIZER.match(containers[0])) or _FLAT.match(path))


def _told_apart(tensors: Sequence[tuple[tuple[str, ...], StoredTensor]], where: str) -> dict[str, StoredTensor]:
    """Tensors by name, of which some have one name, with the keys that lead to each.

    Raises:
        CheckpointError: Their keys do not tell them apart.
    """
    keepers: dict[str, int] = {}
    ranks = [(tensor.role != "parameter", len(keys)) for keys, tensor in tensors]
    for number in sorted(range(len(tensors)), key=ranks.__getitem__):
        keepers.setdefault(tensors[number][1].name, number)
    found: dict[str, StoredTensor] = {}
    for number, (keys, tensor) in enumerate(tensors):
        name = tensor.name if keepers[tensor.name] == number else printable("/".join(keys))
        if name in found or keepers.get(name, number) != number:
            raise unreadable(where, f"two of its tensors have the name {quoted(tensor.name)}")
        found[name] = replace(tensor, name=name)
    return found


def _model_key(value: Any) -> str | None:
    if not isinstance(value, Mapping):
        return None
    return next((key for key in MODELS if isinstance(value.get(key), Mapping)), None)


def _leaves(value: Any, where: str) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """What is no container, with the path and the keys that lead there."""
    values = characters = 0
    stack: list[Iterator[tuple[str, tuple[str, ...], Any]]] = [iter([("", (), value)])]
    while stack:
        found = next(stack[-1], None)
        if found is None:
            stack.pop()
            continue
        path, keys, one = found
        values, characters = values + 1, characters + len(path)
        if values > MOST_VALUES or len(keys) > MOST_DEPTH:
            raise unreadable(where, f"it has more than {MOST_VALUES} values, or containers nested {MOST_DEPTH} deep")
        if len(path) > MOST_NAME or characters > MOST_NAMES:
            most = f"{MOST_NAME} characters, and all together {MOST_NAMES}"
            raise unreadable(where, f"the name of a value in it is too long ({quoted(path)}); it may have {most}")
        if isinstance(one, Mapping | list | tuple):
            stack.append(_inside(path, keys, one))
        else:
            yield path, keys, one


def _inside(path: str, keys: tuple[str, ...], container: Any) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """The values of a container, with their paths and keys."""
    for key, value in container.items() if isinstance(container, Mapping) else enumerate(container):
        yield _joined(path, key), (*keys, shown_key(key)), value


def shown_key(key: Any) -> str:
    """A key of a container as a part of a name."""
    if isinstance(key, int):
        return f"[{key}]"
    return key if isinstance(key, str) else _SHORT.repr(key)


def _joined(path: str, key: Any) -> str:
    return f"{path}.{shown_key(key)}" if path and not isinstance(key, int) else f"{path}{shown_key(key)}"


def of_file(folder: Folder, name: str) -> dict[str, StoredTensor]:
    """The tensors of a file of `torch.save`, by name.

    Raises:
        CheckpointError: It is damaged, or would run code.
    """
    archive = archive_of(folder, name)
    return named_tensors(archive.value, archive.where, archive.tensor)
