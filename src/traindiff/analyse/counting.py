"""Numbers of micro-steps as people count them."""

from __future__ import annotations

import re

_ORDINALS = (
    "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth",
)  # fmt: skip
_MICRO_STEP = re.compile(r"\bmicro-step (\d+) of (\d+)\b")


def as_people_count(text: str) -> str:
    """A sentence in which `micro-step 2 of 4`, counted from 0, is `micro-step 2 (the third of 4)`."""
    return _MICRO_STEP.sub(_with_ordinal, text)


def _with_ordinal(match: re.Match[str]) -> str:
    number, count = int(match[1]), match[2]
    ordinal = f"the {_ORDINALS[number]}" if number < len(_ORDINALS) else f"number {number + 1}"
    return f"micro-step {number} ({ordinal} of {count})"
