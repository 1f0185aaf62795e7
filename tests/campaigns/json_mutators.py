"""JSON that still is JSON, or nearly, and says something else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

Json = Any


@dataclass(frozen=True, slots=True)
class Raw:
    """A text that is written as it is where a value was."""

    text: str


_DEEP = 100_000
_LONE = "\ud800"
_TEXTS = (
    "", "a", _LONE, "\x1b[2J", "\u202eevil", "a" * 300, "a" * 100_000, "..", "../../outside/secret", "/etc/passwd",
    "\0",
    "=HYPERLINK(1)", "<script>", "{0.__class__}", "%s%n", "(a+)+$", "nan", "1e999", "9" * 400, "*", "[", "fc.weight",
    "\n",
    "float32", "optimizer", "0", "-1", "aten.addmm.default", "torch.float32", "../rank-00001/rank.json",
)  # fmt: skip
_NUMBERS = (
    "0", "-1", "1", "2", "65536", "1000000", "2147483648", "-2147483649", "4611686018427387904", "9223372036854775807",
    "9223372036854775808", "-9223372036854775809", "18446744073709551616", "1" + "0" * 100, "1.5", "-0.0", "1e308",
    "1e-320",
    "1e999", "NaN", "Infinity", "-Infinity", "0.1", "3", "1e400",
)  # fmt: skip


def _value(rng: Random) -> Json:
    """A value of any type."""
    kind = rng.randrange(12)
    if kind < 4:
        return Raw(rng.choice(_NUMBERS))
    if kind < 7:
        return rng.choice(_TEXTS)
    if kind < 11:
        return rng.choice(
            (None, True, False, [], {}, [[]], [None], {"": None}, [1, 2], ["a", "a"], {"a": 1}, [{}], [[1], ["x"]],
             {"0": []}, [1.5], [-1], {"tensor": 0}, {"tensor": -1}, {"shape": [1]}, {"name": "a"})
        )  # fmt: skip
    return rng.choice(
        (
            Raw("9" * 5000), Raw("-" + "9" * 5000), Raw("[" * _DEEP + "]" * _DEEP),
            Raw('{"a":' * _DEEP + "1" + "}" * _DEEP),
            Raw("[" * 900 + "]" * 900), Raw('{"a":' * 900 + "1" + "}" * 900), Raw("[" * 300 + "]" * 300),
            "x" * 1_000_000,
            list(range(20_000)), {str(one): one for one in range(5000)}, Raw("[" * _DEEP), Raw("1." + "9" * 5000),
        )
    )  # fmt: skip


def _nodes(content: Json) -> Iterator[tuple[Any, Any]]:
    """Every place in JSON: the container, and the key or index."""
    if isinstance(content, dict):
        for key, value in content.items():
            if not isinstance(value, Raw):
                yield content, key
                yield from _nodes(value)
    elif isinstance(content, list):
        for index, value in enumerate(content):
            if not isinstance(value, Raw):
                yield content, index
                yield from _nodes(value)


def _replace(holder: Any, key: Any, rng: Random) -> None:
    holder[key] = _value(rng)


def _of_the_same_type(holder: Any, key: Any, rng: Random) -> None:
    """Another value of the same type gets past checks of types."""
    value = holder[key]
    if isinstance(value, bool) or value is None:
        holder[key] = rng.choice((True, False, None))
    elif isinstance(value, (int, float)):
        holder[key] = Raw(rng.choice(_NUMBERS))
    elif isinstance(value, str):
        holder[key] = rng.choice((*_TEXTS, value + "x", value[:-1], value.upper(), value.replace("0", "1")))
    elif isinstance(value, list):
        holder[key] = rng.choice((value[::-1], value[1:], value * 2, [*value, None], [value], value * 1000, []))
    else:
        items = list(value.items())
        rng.shuffle(items)
        changed = dict(items[1:])
        holder[key] = rng.choice(
            ({}, changed, {**value, "more": 1}, {name.upper(): one for name, one in items}, {**value, "": value})
        )


def _delete(holder: Any, key: Any, rng: Random) -> None:
    del holder[key]


def _rename(holder: Any, key: Any, rng: Random) -> None:
    if isinstance(holder, dict):
        holder[rng.choice((*_TEXTS, str(key) + "x", *map(str, holder)))] = holder.pop(key)
    else:
        holder.insert(rng.randrange(len(holder) + 1), holder[key])


def _duplicate(holder: Any, key: Any, rng: Random) -> None:
    """The same key twice in an object: the last one counts."""
    if isinstance(holder, dict):
        pair = f"{json.dumps(key)}: {written(_value(rng))}"
        holder[key] = Raw(f"{written(holder[key])}, {pair}")
    else:
        holder.extend([holder[key]] * rng.choice((1, 2, 1000)))


def _swap(holder: Any, key: Any, rng: Random) -> None:
    other = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    holder[key], holder[other] = holder[other], holder[key]


_CHANGES: tuple[Callable[[Any, Any, Random], None], ...] = (
    _replace, _replace, _replace, _of_the_same_type, _of_the_same_type, _of_the_same_type, _delete, _delete, _rename,
    _duplicate, _swap,
)  # fmt: skip


def mutated(text: str, rng: Random) -> str:
    """A JSON text with one change to some of what is in it."""
    content = json.loads(text)
    holder = [content]
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = list(_nodes(holder[0])) if rng.random() < 0.97 else []
        place, key = rng.choice(places) if places else (holder, 0)
        if isinstance(place[key], Raw):
            break
        rng.choice(_CHANGES)(place, key, rng)
        if not holder:
            return ""
    return written(holder[0])


def written(content: Json) -> str:
    """JSON text, in which `Raw` stands as it is."""
    if isinstance(content, Raw):
        return content.text
    if isinstance(content, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {written(value)}" for key, value in content.items()) + "}"
    if isinstance(content, list):
        return "[" + ", ".join(map(written, content)) + "]"
    return json.dumps(content)
