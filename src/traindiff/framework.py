"""Which framework an object is of, told without importing one."""

from __future__ import annotations


def is_of(one: object, package: str) -> bool:
    """Whether its class, or one that this derives from, is defined in a package or in one below it."""
    return any(f"{kind.__module__}.".startswith(f"{package}.") for kind in type(one).__mro__)
