"""JSON of a stranger: bounded before it is parsed."""

from __future__ import annotations

import json
import re
from itertools import accumulate
from typing import Any

from traindiff.untrusted.refusing import Refuse, damaged, quoted

MOST_JSON_BYTES = 1 << 26
"""Size of a JSON file at most: twenty times what a model of 20,000 parameters needs."""

MOST_DEPTH = 64
"""Lists and objects inside each other at most. Python's parser gives up at its recursion limit."""

MOST_VALUES = 1 << 21
"""Values of a text at most: an empty list takes 2 bytes of it, and 64 in memory."""

_MOST_DIGITS = 300
_TEXTS = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
"""Texts in JSON, also one that does not end; possessive, so that the time is linear in any input."""

_OTHER = re.compile(r"[^\[\]{}]+")
_STEPS = {"[": 1, "{": 1, "]": -1, "}": -1}


def parse(data: bytes, *, where: str, refuse: Refuse = damaged, most_bytes: int = MOST_JSON_BYTES) -> Any:
    """The value of a JSON text. Of a key that an object has twice, the last one counts.

    `NaN` and `Infinity`, which Python writes, come as floats.

    Args:
        data: UTF-8.
        where: The file, for messages.
        refuse: Makes the error.
        most_bytes: Size at most.

    Raises:
        TraindiffError: It is not JSON, is too large, is nested too deep, or has too many values or digits.
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
