"""What one stage of a pipeline hands to the next arrives as it was sent: activations, and their gradients back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from traindiff.findings import Finding
from traindiff.findings.sentences import micro_steps_text
from traindiff.merging.distance import Pair, difference
from traindiff.merging.step_table import Entry, Held, Key, num_micro_steps
from traindiff.observation import BOUNDARY, PLACE
from traindiff.rounding import UNIT_ROUNDOFF
from traindiff.rules.rule import Rule

KIND = "boundary"

_STAGE = re.compile(r"stage\[(\d{1,9})\]")
_SENT = re.compile(r"sent(\[\d+\].*)")


class BoundariesHold(Rule):
    """Boundaries of a pipeline's stages at which something else arrived than was sent, by fingerprint.

    The finding is at the module of the receiving stage that comes first in the order of execution.
    """

    name = "boundary"
    finds = "A stage of a pipeline received something else than the one before it sent."
    kinds = ("boundary",)

    def step(self, table: Mapping[Key, Entry], *, step: int) -> Iterator[Finding]:
        """See the class."""
        for key, before in table.items():
            stage, slot = _STAGE.fullmatch(key.path), _SENT.fullmatch(key.slot)
            if key.stage != BOUNDARY or not stage or not slot:
                continue
            number = int(stage[1])
            after = table.get(key._replace(path=f"stage[{number + 1}]", slot=f"received{slot[1]}"))
            if after is None:
                continue
            forward = key.phase == "forward"
            sent, received = (before, after) if forward else (after, before)
            wrong = _wrong_parts(sent, received)
            if not wrong:
                continue
            size = max(float("inf") if one is None else one for _, _, one in wrong)
            ends = (number, number + 1) if forward else (number + 1, number)
            order, first = _first_of_stage(table, received)
            yield Finding(
                step=step, micro_step=wrong[0][1].micro_step, rank=wrong[0][1].rank, phase=key.phase,
                path=first.path, slot=f"received{slot[1]}", order=order, kind=KIND,
                difference=size, says=_says(sent, wrong, ends, micro_steps=num_micro_steps(table)),
                evidence={"stage": ends[1], "micro_steps": [part.micro_step for _, part, _ in wrong]},
            )  # fmt: skip


def _wrong_parts(sent: Entry, received: Entry) -> list[tuple[Held, Held, float | None]]:
    """Micro-batches that arrived as something else: as they were sent, as they arrived, and how far apart."""
    by_place = {(part.micro_step, part.shard): part for part in sent.parts}
    found = []
    for part in received.parts:
        origin = by_place.get((part.micro_step, part.shard))
        if origin is None or (
            origin.summary["fingerprint"] == part.summary["fingerprint"] and sent.dtype == received.dtype
        ):
            continue
        pair = Pair(baseline=_alone(sent, origin), candidate=_alone(received, part))
        found.append((origin, part, difference(pair)))
    return found


def _alone(entry: Entry, part: Held) -> Entry:
    return Entry(key=entry.key, order=entry.order, dtype=entry.dtype, shape=part.shard.shape, summary=part.summary)


def _first_of_stage(table: Mapping[Key, Entry], received: Entry) -> tuple[int, Key]:
    """The first site after the boundary, and its place in execution order; the boundary itself where there is none."""
    place, phase = received.order // PLACE, received.key.phase
    following = (
        (entry.order, key)
        for key, entry in table.items()
        if key.phase == phase and not key.stage and entry.order // PLACE == place
    )
    order, key = min(following, default=(received.order, received.key))
    return min(order, received.order), key


def _says(
    sent: Entry, wrong: Sequence[tuple[Held, Held, float | None]], ends: tuple[int, int], *, micro_steps: int
) -> str:
    origin, part, size = wrong[0]
    what = "" if sent.key.phase == "forward" else "the gradient that "
    numbers = micro_steps_text([one.micro_step for _, one, _ in wrong])
    says = (
        f"Stage {ends[1]} (rank {part.rank}) received something else than {what}stage {ends[0]} "
        f"(rank {origin.rank}) sent, in {numbers} of {micro_steps}"
    )
    other = next((one for one in sent.parts if one.summary["multiset"] == part.summary["multiset"]), None)
    if other is not None and other.micro_step != part.micro_step:
        return f"{says}: what it sent in micro-step {other.micro_step}. Was a buffer read before it was filled?"
    for dtype in ("bfloat16", "float16"):
        if size is not None and 0.15 * UNIT_ROUNDOFF[dtype] < size < 1.2 * UNIT_ROUNDOFF[dtype]:
            return f"{says}: it differs by {size:.2g} of its size, as rounding to {dtype} would make it."
    return f"{says}." if size is None else f"{says}: it differs by {size:.2g} of its size."
