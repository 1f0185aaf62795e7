"""Tables, statistics and configurations: texts whose words are changed."""

from __future__ import annotations

import re
from random import Random

from tests.campaigns.byte_mutators import mangled

_WORD = re.compile(r"-?\d+(?:\.\d+)?|\w+|[^\w\s]")
_WORDS = (
    "", "0", "-1", "1", "2", "3", "9" * 20, "9" * 5000, "1e999", "nan", "inf", "-inf", "True", "None", "1.5", "[2, 2]",
    "[]",
    "[" * 2000, "[9223372036854775807]", "[4294967296, 4294967296]", "[3037000500, 3037000500]", "[-1]", '"', ",",
    "\r", "\n",
    "\0", "a" * 300, "a" * 200_000, "..", "../../outside/secret", "/etc/passwd", "=1+1", "\x1b[2J", "\u202e",
    "(-inf, 0]",
    "(nan, inf)", "float32", "bfloat16", "nonsense", "forward", "backward", "param_name", "shape", "max",
    "module.fc.weight",
    "tensor([])", "tensor([1,2", "2023-01-01", "0x10", "[[a]]", "{a = 1}", "'''", "1_000", "spike", "factor", "٣",
    "([)",
    "order.txt", ".", "Linear_1_0th_output_call_99999999999", "[1000000, 1000000]", "1000000", "4096", "[4096,4096]",
)  # fmt: skip


def mutated_text(data: bytes, rng: Random) -> bytes:
    """A text with some words changed, moved, or doubled, or with other bytes."""
    change = rng.randrange(8)
    if change == 0:
        return mangled(data, rng)
    text = data.decode("utf-8", "surrogateescape")
    if change == 1:
        lines = text.splitlines(keepends=True)
        rng.shuffle(lines)
        return "".join(lines[: rng.randrange(len(lines) + 1)]).encode("utf-8", "surrogateescape")
    if change == 2:
        lines = text.splitlines(keepends=True) or [""]
        at = rng.randrange(len(lines))
        lines[at:at] = [rng.choice(lines)] * rng.choice((1, 2, 500))
        return "".join(lines).encode("utf-8", "surrogateescape")
    words = list(_WORD.finditer(text))
    for match in sorted(rng.sample(words, min(len(words), rng.choice((1, 1, 2, 4)))), key=lambda one: -one.start()):
        other = rng.choice((*_WORDS, rng.choice(words)[0], match[0] * 2))
        text = text[: match.start()] + other + text[match.end() :]
    return text.encode("utf-8", "surrogatepass" if change == 3 else "replace" if change == 4 else "surrogateescape")
