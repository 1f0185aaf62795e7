"""Which keys and types a parsed text must have: one description per kind of file.

    RUN = shaped({"version": whole(1), "settings": shaped({}, {"bounds": listed(NUMBER)})}, {"mesh": nullable(MESH)})
    demanded(content, RUN, where="run.json")

A demand is a function of a value and its place. It gives nothing back, and raises `Unmet` where the value is not as
demanded. Keys that a description does not name are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from traindiff.errors import type_of
from traindiff.untrusted.refusing import Refuse, damaged, quoted

Demand = Callable[[Any, str], None]
"""Looks at a value, which is at a place such as `settings.bounds[3]`; raises `Unmet`."""

_NAMES: Mapping[type, str] = {
    dict: "an object", list: "a list", str: "a text", bool: "a boolean", int: "an integer", float: "a number",
    type(None): "null",
}  # fmt: skip


class Unmet(Exception):  # noqa: N818
    """A value is not as demanded; the message is a clause that says which and how."""


def demanded(value: Any, demand: Demand, *, where: str, refuse: Refuse = damaged) -> Any:
    """The value, if it is as demanded.

    Args:
        value: What was parsed.
        demand: What it must be.
        where: The file, for messages.
        refuse: Makes the error.

    Raises:
        TraindiffError: It is not.
    """
    try:
        demand(value, "")
    except Unmet as unmet:
        raise refuse(where, str(unmet)) from None
    return value


def shaped(required: Mapping[str, Demand], optional: Mapping[str, Demand] | None = None) -> Demand:
    """An object with these keys. Others are ignored."""
    known = {**required, **(optional or {})}

    def check(value: Any, place: str) -> None:
        _is(dict, value, place)
        for name in required:
            if name not in value:
                raise Unmet(f"{place or 'it'} has no {quoted(name)}")
        for name, demand in known.items():
            if name in value:
                demand(value[name], f"{place}.{name}" if place else name)

    return check


def mapped(demand: Demand) -> Demand:
    """An object with any keys, whose values are all as demanded."""

    def check(value: Any, place: str) -> None:
        _is(dict, value, place)
        for name, one in value.items():
            demand(one, f"{place}[{quoted(name)}]")

    return check


def listed(demand: Demand, *, least: int = 0, most: int | None = None) -> Demand:
    """A list whose items are all as demanded."""

    def check(value: Any, place: str) -> None:
        _is(list, value, place)
        if len(value) < least:
            raise Unmet(f"{_named(place)} has {len(value)} items, and must have at least {least}")
        if most is not None and len(value) > most:
            raise Unmet(f"{_named(place)} has {len(value)} items, and may have {most}")
        for number, one in enumerate(value):
            demand(one, f"{place}[{number}]")

    return check


def nullable(demand: Demand) -> Demand:
    """Null, or as demanded."""

    def check(value: Any, place: str) -> None:
        if value is not None:
            demand(value, place)

    return check


def either(*demands: Demand) -> Demand:
    """As one of several demands. The message is that of the last one."""

    def check(value: Any, place: str) -> None:
        for demand in demands[:-1]:
            try:
                return demand(value, place)
            except Unmet:
                continue
        return demands[-1](value, place)

    return check


def one_of(values: Collection[str]) -> Demand:
    """One of these texts."""

    def check(value: Any, place: str) -> None:
        _is(str, value, place)
        if value not in values:
            raise Unmet(f"{_named(place)} is {quoted(value)}, and must be one of: {', '.join(sorted(values))}")

    return check


def whole(least: int = -(2**63), most: int = 2**63 - 1) -> Demand:
    """An integer in a range, both ends included."""

    def check(value: Any, place: str) -> None:
        _is(int, value, place)
        if not least <= value <= most:
            raise Unmet(f"{_named(place)} is {value}, and must be from {least} to {most}")

    return check


def _is(kind: type, value: Any, place: str) -> None:
    if type(value) is not kind:
        raise Unmet(f"{_named(place)} must be {_NAMES[kind]}, found {_NAMES.get(type(value), type_of(value))}")


def _named(place: str) -> str:
    return place or "it"


def _number(value: Any, place: str) -> None:
    if type(value) is not int:
        _is(float, value, place)
    if math.isnan(value):
        raise Unmet(f"{_named(place)} is NaN, and must be a number")


def _anything(value: Any, place: str) -> None:
    del value, place


def _text(value: Any, place: str) -> None:
    _is(str, value, place)


def _flag(value: Any, place: str) -> None:
    _is(bool, value, place)


ANYTHING: Demand = _anything
"""Any value, of which nothing but its text is used."""

TEXT: Demand = _text
NUMBER: Demand = _number
"""An integer or a float; infinities too, but not NaN."""

FLAG: Demand = _flag
