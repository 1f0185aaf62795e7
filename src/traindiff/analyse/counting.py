"""Numbers of micro-steps as people count them."""

from __future__ import annotations

import re

_ORDINALS = (
    "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth",
)  # fmt: skip
_MICRO_STEP = re.compile(r"(\brank \d+ in )?\bmicro-step (\d+) of (\d+)\b")


def as_people_count(text: str) -> str:
    """A sentence in which `micro-step 2 of 4`, counted from 0, is `micro-step 2 (the third of 4)`.

    `rank 1 in micro-step 0 of 8` stays: 8 is the number of contributions of all ranks.
    """
    return _MICRO_STEP.sub(_with_ordinal, text)


def _with_ordinal(match: re.Match[str]) -> str:
    if match[1]:
        return match[0]
    number, count = int(match[2]), match[3]
    ordinal = f"the {_ORDINALS[number]}" if number < len(_ORDINALS) else f"number {number + 1}"
    return f"micro-step {number} ({ordinal} of {count})"
