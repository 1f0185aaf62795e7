"""Lines of `observations.crc` that do not fit, or that no reader should believe."""

from __future__ import annotations

import zlib
from random import Random

from tests.campaigns.byte_mutators import mangled
from tests.campaigns.drafts import Stream

_NUMBERS = (
    b"0", b"-1", b"1", b"7", b"8", b"9", b"9" * 4300, b"9" * 5000, b"4611686018427387904", b"9223372036854775807",
    b"9223372036854775808", b"18446744073709551616", b"1" + b"0" * 100, b"00000000000", b"+5", b"0x10", b" 5", b"1e9",
    b"",
    "٣".encode(), b"1073741824", b"1000000000000", b"1_0",
)  # fmt: skip


def _lines(stream: Stream) -> list[list[bytes]]:
    return [line.split(b" ") for line in stream.sealed().splitlines()]


def mutate(stream: Stream, rng: Random) -> None:  # noqa: C901  a list of cases
    """Change the seals of a stream and leave its messages, or put another message under right ones."""
    lines = _lines(stream)
    at = rng.randrange(len(lines)) if lines else 0
    ending = b"\n"
    change = rng.randrange(12)
    if not lines or change == 0:
        stream.seals = mangled(stream.sealed(), rng)
        return
    if change < 4:
        lines[at][rng.randrange(3)] = rng.choice(_NUMBERS)
    elif change == 4:  # a length that no file has, and offsets that follow it
        length = rng.choice((1 << 62, 1 << 40, 1 << 33, 10**30))
        lines[at][1] = b"%d" % length
        for later in range(at + 1, len(lines)):
            lines[later][0] = b"%d" % (int(lines[later - 1][0]) + int(lines[later - 1][1]))
    elif change == 5:
        other = rng.randrange(len(lines))
        lines[at], lines[other] = lines[other], lines[at]
    elif change == 6:
        lines.insert(at, lines[at])
    elif change == 7:
        del lines[at]
    elif change == 8:
        ending = rng.choice((b"\r\n", b"\r", b"\n\n", b" \n", b"\0\n", b""))
    elif change == 9:  # overlapping, or with a gap
        lines[at][rng.randrange(2)] = b"%d" % max(
            0, int(lines[at][rng.randrange(2)]) + rng.choice((-8, -1, 1, 8, 1000))
        )
    elif change == 10:  # nothing is nothing's right checksum
        end = int(lines[-1][0]) + int(lines[-1][1])
        lines += [[b"%d" % end, b"0", b"%08x" % zlib.crc32(b"")]] * rng.choice((1, 5, 10_000))
    else:  # two messages under one seal
        joined = b"".join(stream.messages[at : at + 2])
        lines[at : at + 2] = [[lines[at][0], b"%d" % len(joined), b"%08x" % zlib.crc32(joined)]]
    text = b"".join(b" ".join(line) + ending for line in lines)
    if rng.random() < 0.1:
        text = text[: -rng.choice((1, 3, 12))]
    stream.seals = text
