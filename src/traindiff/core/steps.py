"""Sets of step numbers as users write them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from traindiff.errors import Problem

_RANGE = re.compile(r"\s*+(\d{1,19})\s*+(?:(-)\s*+(\d{0,19})\s*+)?")
"""Possessive quantifiers keep the time linear in any text."""

_MOST_CHARACTERS = 1 << 22
_MOST_SAID = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSelection:
    """A set of steps; `text` is how the user wrote it, empty for all steps."""

    ranges: tuple[tuple[int, int | None], ...] = ()
    text: str = ""

    def __contains__(self, step: object) -> bool:
        return not self.ranges or any(
            isinstance(step, int) and first <= step and (last is None or step <= last) for first, last in self.ranges
        )

    @property
    def spans(self) -> tuple[tuple[int, int | None], ...]:
        """The same set as ranges that ascend and have a gap between each two of them."""
        found: list[tuple[int, int | None]] = []
        for first, last in sorted(self.ranges, key=lambda one: one[0]) or [(0, None)]:
            if not found or (found[-1][1] is not None and first > found[-1][1] + 1):
                found.append((first, last))
            elif found[-1][1] is not None:
                found[-1] = (found[-1][0], None if last is None else max(last, found[-1][1]))
        return tuple(found)

    @property
    def span(self) -> tuple[int, int | None]:
        """The first and the last step; None for the last if there is no end."""
        spans = self.spans
        return spans[0][0], spans[-1][1]

    def has_after(self, step: int, *, within: StepSelection, every: int) -> bool:
        """True if a later step than this one is in both selections and divisible by `every`."""
        whole: tuple[tuple[int, int | None], ...] = ((0, None),)
        for first, last in self.ranges or whole:
            for other_first, other_last in within.ranges or whole:
                begin = max(first, other_first, step + 1)
                end = min((one for one in (last, other_last) if one is not None), default=None)
                if end is None or -(-begin // every) * every <= end:
                    return True
        return False


ALL_STEPS = StepSelection()


def parse_steps(value: str | int | Iterable[int] | None, *, where: str) -> StepSelection | Problem:
    """Read `"0-9,20,30-"`, a number, an iterable of numbers, or None for all steps.

    Ranges include both ends; `30-` means 30 and all after it.
    """
    if value is None:
        return ALL_STEPS
    text = value if isinstance(value, str) else _listed(value, where)
    if isinstance(text, Problem):
        return text
    if len(text) > _MOST_CHARACTERS:
        return _problem(where, f"they take {len(text)} characters to list, and may take {_MOST_CHARACTERS}.")
    ranges: list[tuple[int, int | None]] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if not match:
            return _problem(where, f"{part[:_MOST_SAID]!r} is not a step or a range of steps.")
        first = int(match[1])
        last = first if not match[2] else int(match[3]) if match[3] else None
        if last is not None and last < first:
            return _problem(where, f"the range {part.strip()!r} ends before it begins.")
        ranges.append((first, last))
    return StepSelection(ranges=tuple(ranges), text=text)


def _listed(value: int | Iterable[int], where: str) -> str | Problem:
    """Numbers of steps as text."""
    if isinstance(value, int):
        return str(value)
    if isinstance(value, range) and value.step == 1 and len(value) and value.start >= 0:
        return f"{value.start}-{value.stop - 1}"  # which may be far away
    try:
        numbers = list(value)
    except TypeError:
        return _problem(where, f"{value!r} is not a step or a range of steps.")
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        return _problem(where, f"{numbers!r} has entries that are not whole numbers from 0 up.")
    if not numbers:
        return _problem(where, "names no step at all.")
    return ",".join(str(number) for number in sorted(set(numbers)))


def _problem(where: str, what: str) -> Problem:
    return Problem(
        where=where, what=what, fix='Write steps like "0-9,20,30-", counted from 0, or leave it out for all of them.'
    )
