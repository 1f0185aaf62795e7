"""Replace an attribute or an entry for a while."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """`owner.name` is `value` inside the block, on this object only, and as it was after it.

    An attribute that the object has from its class, such as a method, is its class's again.
    """
    own = vars(owner)
    had, before = name in own, own.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextmanager
def replaced_entry(owner: MutableMapping[str, Any], key: str, value: object) -> Iterator[None]:
    """`owner[key]` is `value` inside the block, and as it was after it."""
    before = owner[key]
    owner[key] = value
    try:
        yield
    finally:
        owner[key] = before
