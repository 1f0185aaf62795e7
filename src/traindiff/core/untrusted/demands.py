"""Demands on parsed JSON: one description of keys and types per kind of file.

    RUN = shaped({"version": whole(1), "settings": shaped({}, {"bounds": listed(NUMBER)})}, {"mesh": nullable(MESH)})
    demanded(content, RUN, where="run.json")

A demand is a function of a value and its place. It returns nothing, and raises `Unmet` if the value is not as demanded.
Keys that a description does not name are ignored.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

from traindiff.core.site import printable
from traindiff.errors import CorruptRecordingError, TraindiffError, type_of

Refuse = Callable[[str, str], TraindiffError]
"""Function that makes the error for a file: from its path, and a clause that says what is wrong with it."""

_MOST_QUOTED = 80


def damaged(where: str, what: str) -> CorruptRecordingError:
    """The error for a damaged file of a recording; `what` is a clause without a full stop."""
    return CorruptRecordingError(
        f"{printable(where)} is damaged: {what}. Restore the file from where it was copied, or record again."
    )


def quoted(text: str) -> str:
    """A text of a stranger for messages: quoted, printable and cut to a short length."""
    shown = printable(text[: _MOST_QUOTED + 1])
    return f'"{shown if len(shown) <= _MOST_QUOTED else shown[:_MOST_QUOTED] + "..."}"'


MOST_JSON_BYTES = 1 << 26
"""Limit for the size of a JSON file: twenty times as much as a model of 20,000 parameters needs."""

MOST_DEPTH = 64
"""Limit for nested lists and objects. Python's parser fails at its recursion limit."""

MOST_VALUES = 1 << 21
"""Limit for the values of a text: an empty list takes 2 bytes of text, and 64 bytes of memory."""

_MOST_DIGITS = 300
_TEXTS = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
"""Strings in JSON, also an unterminated one; possessive quantifiers keep the time linear in any input."""

_OTHER = re.compile(r"[^\[\]{}]+")
_STEPS = {"[": 1, "{": 1, "]": -1, "}": -1}


def parse(data: bytes, *, where: str, refuse: Refuse = damaged, most_bytes: int = MOST_JSON_BYTES) -> Any:
    """The value of a JSON text in UTF-8, the content of the file `where`.

    If an object has a key twice, the last one counts. `NaN` and `Infinity`, which Python writes, become floats.

    Raises:
        TraindiffError: It is not JSON, has more than `most_bytes`, is nested too deep, or has too many values or
            digits; `refuse` has made the error.
    """
    if len(data) > most_bytes:
        raise refuse(where, f"it has {len(data)} bytes, and may have {most_bytes}")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise refuse(where, str(error)) from None
    outside = _TEXTS.sub("", text)
    if outside.count(",") + outside.count("[") + outside.count("{") > MOST_VALUES:
        raise refuse(where, f"it has more than {MOST_VALUES} values")
    depth = max(accumulate(map(_STEPS.__getitem__, _OTHER.sub("", outside))), default=0)
    if depth > MOST_DEPTH:
        raise refuse(where, f"it has lists or objects nested {depth} deep, and may have {MOST_DEPTH}")
    try:
        return json.loads(text, parse_int=_integer)
    except ValueError as error:
        raise refuse(where, str(error)) from None


def _integer(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"the integer {quoted(text[:24])} has {len(text)} digits, and may have {_MOST_DIGITS}")
    return int(text)


Demand = Callable[[Any, str], None]
"""Checks a value at a place such as `settings.bounds[3]`; raises `Unmet`."""

_NAMES: Mapping[type, str] = {
    dict: "an object", list: "a list", str: "a text", bool: "a boolean", int: "an integer", float: "a number",
    type(None): "null",
}  # fmt: skip


class Unmet(Exception):  # noqa: N818
    """A value is not as demanded; the message is a clause that names the value and the demand."""


def demanded(value: Any, demand: Demand, *, where: str, refuse: Refuse = damaged) -> Any:
    """The parsed value of the file `where`, after checking that it meets a demand.

    Raises:
        TraindiffError: The value does not meet the demand. `refuse` makes the error.
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
    """A demand that a value is a list, and that each item meets `demand`."""

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
    """A demand that a value meets if it meets one of several. If it meets none, the message is that of the last one."""

    def check(value: Any, place: str) -> None:
        for demand in demands[:-1]:
            try:
                return demand(value, place)
            except Unmet:
                continue
        return demands[-1](value, place)

    return check


def one_of(values: Collection[str]) -> Demand:
    """A demand that a value is one of these texts."""

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


ANYTHING: Demand = _anything
"""Any value; only its text is used."""

TEXT: Demand = partial(_is, str)
NUMBER: Demand = _number
"""An integer or a float; infinities are allowed, NaN is not."""

FLAG: Demand = partial(_is, bool)
