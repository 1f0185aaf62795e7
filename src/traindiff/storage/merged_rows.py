"""The kinds of rows of a merged step, and the texts in them that list ranks or places. FORMAT.md describes both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from traindiff.core.observation import Observation
from traindiff.core.shards import Shard
from traindiff.storage.schema import Malformed
from traindiff.storage.stream import StepObservations

ENTRY, RANKS, PART, MICRO_STEP, WHOLE = range(5)
"""What a row is, in its column `evaluation`: a site merged over ranks; what is known of its ranks; numbers of some of
its parts; the sum of a micro-step; the mark of a step that is stored rank by rank."""


def is_whole(step: StepObservations) -> bool:
    """True for the mark of a step that is stored rank by rank."""
    return len(step.observations) == 1 and step.observations[0].evaluation == WHOLE


def whole_mark(optimizer: str, step: int) -> Observation:
    """The only row of a step that is stored rank by rank."""
    return Observation(
        step=step, micro_step=0, optimizer=optimizer, phase="param", stage="", path="", slot="", call=0, order=0,
        dtype="", shard=Shard.whole(()), evaluation=WHOLE,
    )  # fmt: skip


def listed(numbers: Iterable[int]) -> str:
    """Numbers as a text: `0-2,5`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def numbers_in(text: str, limit: int, most: int) -> list[int]:
    """The numbers that `listed` wrote.

    Args:
        text: Of a file that a stranger may have written.
        limit: All numbers are below it.
        most: There are no more numbers.

    Raises:
        Malformed: The text is another one.
    """
    found: list[int] = []
    for span in text.split(","):
        first, _, last = span.partition("-")
        if not _is_number(first) or not (last == "" or _is_number(last)):
            raise Malformed(f"{text[:80]!r} lists no numbers")
        ends = int(first), int(last or first)
        if not ends[0] <= ends[1] < limit or len(found) + ends[1] - ends[0] >= most:
            raise Malformed(f"{text[:80]!r} does not list up to {most} numbers below {limit}")
        found += range(ends[0], ends[1] + 1)
    return found


def groups_text(groups: Sequence[Sequence[int]]) -> str:
    """Groups of ranks as a text: `0-2|3`."""
    return "|".join(map(listed, groups))


def groups_in(text: str, limit: int, most: int) -> tuple[tuple[int, ...], ...]:
    """The groups that `groups_text` wrote. The arguments are those of `numbers_in`, for all groups together.

    Raises:
        Malformed: The text is another one.
    """
    found: list[tuple[int, ...]] = []
    for group in text.split("|") if text else ():
        found.append(tuple(numbers_in(group, limit, most - sum(map(len, found)))))
    return tuple(found)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9
