"""Where ranks find each other."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch import distributed

FOR_EVER = timedelta(days=1)
"""Ranks wait for each other so long: whoever launched them is less patient, and knows better what hangs."""


def connected(store: str, world_size: int) -> Any:
    """A store of torch's.

    Args:
        store: `file:///PATH`, or `tcp://HOST:PORT/PREFIX` for a part of the store that listens there.
        world_size: Number of ranks.
    """
    stores: Any = distributed  # its exports are not typed
    kind, _, where = store.partition("://")
    if kind == "file":
        return stores.FileStore(where, world_size)
    address, _, prefix = where.partition("/")
    host, _, port = address.rpartition(":")
    return stores.PrefixStore(prefix, stores.TCPStore(host, int(port), is_master=False, timeout=FOR_EVER))
