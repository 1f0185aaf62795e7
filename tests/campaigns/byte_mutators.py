"""Bytes that are changed without knowing what they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random

INTERESTING = (
    b"\xff\xff\xff\x7f", b"\x00\x00\x00\x80", b"\xff" * 8, b"\xff" * 7 + b"\x7f", b"\x00" * 7 + b"\x40", b"\x00",
    b"\xff\xff\xff\xff", b"\n", b"\x00" * 8, b"\x00\x00\x00\x00\x00\x00\xf8\x7f",
)  # fmt: skip
"""Numbers at the ends of their ranges."""


def _flips(data: bytearray, rng: Random, others: Sequence[bytes]) -> None:
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _numbers(data: bytearray, rng: Random, others: Sequence[bytes]) -> None:
    for _ in range(rng.choice((1, 1, 2, 4))):
        what = rng.choice(INTERESTING)
        place = rng.randrange(len(data))
        place -= place % rng.choice((1, 4, 8))
        data[place : place + len(what)] = what


def _cut(data: bytearray, rng: Random, others: Sequence[bytes]) -> None:
    del data[rng.randrange(len(data)) :]


def _beheaded(data: bytearray, rng: Random, others: Sequence[bytes]) -> None:
    del data[: 1 + rng.randrange(min(len(data), rng.choice((8, 1 << 16))))]


def _removed(data: bytearray, rng: Random, others: Sequence[bytes]) -> None:
    place = rng.randrange(len(data))
    del data[place : place + rng.choice((1, 4, 8, 64))]


def _inserted(data: bytearray, rng: Random, others: Sequence[bytes]) -> None:
    place = rng.randrange(len(data) + 1)
    data[place:place] = rng.choice((rng.randbytes(rng.choice((1, 8, 64))), rng.choice(INTERESTING)))


def _doubled(data: bytearray, rng: Random, others: Sequence[bytes]) -> None:
    first = rng.randrange(len(data))
    part = data[first : first + rng.choice((1, 8, 64, 512))]
    data[first:first] = part * rng.choice((1, 2, 50))


def _spliced(data: bytearray, rng: Random, others: Sequence[bytes]) -> None:
    other = rng.choice(others) if others else bytes(data)
    place, first = rng.randrange(len(data)), rng.randrange(len(other) + 1)
    data[place:] = other[first:]


def _run(data: bytearray, rng: Random, others: Sequence[bytes]) -> None:
    place, length = rng.randrange(len(data)), rng.choice((8, 64, 512))
    data[place : place + length] = rng.choice((b"\0", b"\xff", b"[", b"9", b" ")) * length


def _huge_run(data: bytearray, rng: Random, others: Sequence[bytes]) -> None:
    place = rng.randrange(len(data))
    data[place:place] = rng.choice((b"\0", b"\xff", b"[", b"9", b"\n", b'{"a":')) * rng.choice((10_000, 100_000))


def _emptied(data: bytearray, rng: Random, others: Sequence[bytes]) -> None:
    data.clear()


BYTES: Mapping[str, tuple[int, Callable[[bytearray, Random, Sequence[bytes]], None]]] = {
    "flips": (8, _flips), "numbers": (8, _numbers), "cut": (3, _cut), "beheaded": (2, _beheaded),
    "removed": (3, _removed), "inserted": (3, _inserted), "doubled": (3, _doubled), "spliced": (3, _spliced),
    "run": (3, _run), "huge run": (1, _huge_run), "emptied": (1, _emptied),
}  # fmt: skip
"""Weight and mutator by name."""

_NAMES = [name for name, (weight, _) in BYTES.items() for _ in range(weight)]


def mangled(content: bytes, rng: Random, others: Sequence[bytes] = ()) -> bytes:
    """Other bytes in place of these; `others` are what may be spliced in."""
    if not content:
        return rng.randbytes(rng.choice((1, 8, 100)))
    data = bytearray(content)
    BYTES[rng.choice(_NAMES)][1](data, rng, others)
    return bytes(data)
