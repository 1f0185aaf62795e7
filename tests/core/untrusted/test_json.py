"""JSON of a stranger: what it costs is bounded, and which keys it has is demanded."""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traindiff.core.untrusted.demands import (
    FLAG,
    NUMBER,
    TEXT,
    Demand,
    demanded,
    either,
    listed,
    mapped,
    nullable,
    one_of,
    parse,
    shaped,
    whole,
)
from traindiff.errors import CorruptRecordingError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)


@given(VALUES)
def test_what_json_can_say_is_parsed(value: Any) -> None:
    assert parse(json.dumps(value).encode(), where="x") == value


@given(st.binary())
def test_any_bytes_are_a_value_or_damage(data: bytes) -> None:
    with suppress(CorruptRecordingError):
        parse(data, where="x")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[" * 100_000, "nested 100000 deep"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested 100000 deep"),
        (b'"' + b"[" * 100, "Unterminated"),
        (b"1" * 5000, "has 5000 digits"),
        (b"-" + b"1" * 330, "has 331 digits"),
        (b"[" + b"1," * 3_000_000 + b"1]", "more than 2097152 values"),
        (b"\xff", "utf-8"),
        (b"[1, 2", "delimiter"),
        (b" " * ((1 << 26) + 1), "and may have 67108864"),
        (json.dumps([[]] * 3).encode("utf-16"), "utf-8"),
    ],
    ids=range(10),
)
def test_what_would_cost_too_much_is_refused_before_it_is_parsed(data: bytes, message: str) -> None:
    with pytest.raises(CorruptRecordingError, match=message):
        parse(data, where="x")


def test_brackets_in_texts_are_not_depth() -> None:
    assert parse(json.dumps({"[" * 100: '\\"' + "{" * 100}).encode(), where="x")


@pytest.mark.parametrize("data", [b'"' + b'\\"' * 1_000_000, b'\\"' * 1_000_000, b'"\\' * 1_000_000])
def test_the_time_is_linear(data: bytes) -> None:
    begin = time.perf_counter()
    with pytest.raises(CorruptRecordingError):
        parse(data, where="x")

    assert time.perf_counter() - begin < 5


def test_numbers_that_json_lacks_come_as_floats() -> None:
    found = parse(b"[NaN, Infinity, 1e999]", where="x")

    assert math.isnan(found[0])
    assert found[1:] == [math.inf, math.inf]


RUN = shaped(
    {"settings": shaped({"detail": listed(TEXT)}, {"every": whole(1)})},
    {"mesh": nullable(mapped(either(whole(), TEXT))), "ok": FLAG, "kind": one_of(("a", "b")), "share": NUMBER},
)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "it must be an object, found a list"),
        ({}, 'it has no "settings"'),
        ({"settings": []}, "settings must be an object, found a list"),
        ({"settings": {}}, 'settings has no "detail"'),
        ({"settings": {"detail": [1]}}, r"settings.detail\[0\] must be a text, found an integer"),
        ({"settings": {"detail": [], "every": 0}}, "settings.every is 0, and must be from 1 to"),
        ({"settings": {"detail": [], "every": True}}, "settings.every must be an integer, found a boolean"),
        ({"settings": {"detail": []}, "mesh": {"x\n": None}}, r'mesh\["x\\n"\] must be a text, found null'),
        ({"settings": {"detail": []}, "ok": 1}, "ok must be a boolean"),
        ({"settings": {"detail": []}, "kind": "c"}, 'kind is "c", and must be one of: a, b'),
        ({"settings": {"detail": []}, "share": math.nan}, "share is NaN"),
        ({"settings": {"detail": []}, "share": "1"}, "share must be a number, found a text"),
    ],
)
def test_what_is_not_as_demanded_is_damage_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(CorruptRecordingError, match=f"run.json is damaged: {message}"):
        demanded(value, RUN, where="run.json")


def test_what_is_as_demanded_is_given_back() -> None:
    value = {"settings": {"detail": ["x"], "every": 2}, "mesh": None, "ok": True, "kind": "a", "share": 1, "more": 3}

    assert demanded(value, RUN, where="run.json") is value


def test_a_list_may_have_a_smallest_length() -> None:
    demand: Demand = listed(TEXT, least=1)

    with pytest.raises(CorruptRecordingError, match="it has 0 items, and must have at least 1"):
        demanded([], demand, where="x")
