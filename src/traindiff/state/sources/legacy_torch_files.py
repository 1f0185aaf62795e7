"""Files that torch.save wrote before version 1.6: pickles one after the other, and then the elements of storages.

There are five pickles: a magic number, the version of the protocol, sizes of types, the object, and the keys of
storages. Then, in the order of the keys, each storage has its number of elements in 8 bytes, and its elements.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from traindiff.core.untrusted.demands import quoted
from traindiff.state.dtypes import ITEM_BYTES
from traindiff.state.sources.pickles import MOST_PICKLE_BYTES, loaded
from traindiff.state.sources.readable import readable
from traindiff.state.sources.torch_tensors import Repeated, Storage, described_tensor, is_storage_key, storage_dtype
from traindiff.state.stored import Bytes, Place, Role, StoredTensor, unreadable

START = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""The pickle of the magic number, 0x1950A86A20F9469CFC6C."""

_VERSION = 1001
_LENGTH_BYTES = 8


@dataclass(slots=True)
class _Found:
    """What the object names of a storage: its dtype and number of elements; and where it is, which is known later."""

    dtype: str
    count: int
    place: Place | None = field(default=None)


class LegacyFile:
    """A file of `torch.save` in its old format.

    Args:
        content: Its bytes.
        where: The file, for messages.

    Attributes:
        value: The object that was saved, as data.

    Raises:
        CheckpointError: It is no such file, is damaged, or would run code.
    """

    def __init__(self, content: Bytes, where: str) -> None:
        self.where = where
        self._content = content
        self._repeated = Repeated()
        self._storages: dict[str, _Found] = {}
        rest = content.after(len(START))
        version, rest = self._pickle(rest, self._no_storage)
        about, rest = self._pickle(rest, self._no_storage)
        if version != _VERSION or not isinstance(about, dict) or about.get("little_endian") is not True:
            raise unreadable(where, f"its protocol is not {_VERSION}, or its machine had another byte order")
        self.value, rest = self._pickle(rest, self._stored)
        keys, rest = self._pickle(rest, self._no_storage)
        are_names = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
        if not are_names or {*keys} != {*self._storages} or len(keys) != len(self._storages):
            raise unreadable(where, "its list of storages is not that of its tensors")
        for key in keys:
            rest = self._locate(key, rest)

    def _pickle(self, rest: Bytes, stored: Callable[[Any], Any]) -> tuple[Any, Bytes]:
        """The value of the next pickle, and what comes after it."""
        limited = replace(rest, count=min(rest.count, MOST_PICKLE_BYTES))
        stream = readable(limited)
        try:
            for _ in pickletools.genops(stream):
                pass
        except Exception as error:  # noqa: BLE001  a damaged pickle raises anything
            raise unreadable(self.where, f"a pickle in it is damaged or cut off ({str(error)[:80]})") from None
        end = stream.tell()
        return loaded(rest.read(0, end).tobytes(), where=self.where, stored=stored), rest.after(end)

    def _no_storage(self, _: Any) -> Any:
        raise unreadable(self.where, "it names a storage in a way that torch.save does not")

    def _stored(self, key: Any) -> Storage:
        """What stands for a storage, or for a part of it."""
        if not is_storage_key(key):
            raise self._no_storage(key)
        dtype, name, count = storage_dtype(key[1]), key[2], key[4]
        known = self._storages.setdefault(name, _Found(dtype or "", count))
        if dtype is None or count < 0 or (known.dtype, known.count) != (dtype, count):
            raise unreadable(self.where, f"its storage {quoted(name)} has an unknown dtype, or two of them")
        first, length = 0, count
        view = key[5] if len(key) > 5 else None
        if view is not None:
            if not (isinstance(view, tuple) and len(view) == 3 and all(type(one) is int for one in view[1:])):
                raise self._no_storage(key)
            first, length = view[1:]
            if first < 0 or length < 0 or first + length > count:
                raise unreadable(self.where, f"a part of its storage {quoted(name)} lies outside of it")
        find = partial(self._place, name, first * ITEM_BYTES[dtype])
        return Storage(key=name, dtype=dtype, count=length, find=find, repeated=self._repeated)

    def _locate(self, key: str, rest: Bytes) -> Bytes:
        """Note where a storage is, and return what comes after it."""
        found = self._storages[key]
        size = found.count * ITEM_BYTES[found.dtype]
        length = int.from_bytes(rest.read(0, _LENGTH_BYTES).tobytes(), "little", signed=True)
        what = f"a storage of it has {found.count} elements of {found.dtype}"
        if length != found.count:
            raise unreadable(self.where, f"{what}, and the file says {length}")
        if _LENGTH_BYTES + size > rest.count:
            raise unreadable(self.where, f"{what}, and the file ends before")
        start = rest.after(_LENGTH_BYTES)
        found.place = Place(content=replace(start, count=size))
        return start.after(size)

    def _place(self, key: str, first: int) -> Place:
        place = self._storages[key].place
        assert place is not None, "storages are located before anything is read"
        return replace(place, content=place.content.after(first))

    def tensor(self, value: Any, name: str, role: Role = "parameter") -> StoredTensor | None:
        """The tensor that a value describes; None if it describes none.

        Raises:
            CheckpointError: It lies outside of its storage.
        """
        return described_tensor(value, name, role, self.where)
