"""Copies agree: what several ranks hold of one tensor is the same on all of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from traindiff.analyse.findings import Finding, micro_steps_text, ranks_text
from traindiff.analyse.merge.distance import Pair, difference
from traindiff.analyse.merge.finding_at import finding_at
from traindiff.analyse.merge.step_table import Entry, Held, Key, num_micro_steps
from traindiff.analyse.rules.rule import Rule
from traindiff.core.observation import BOUNDARY, PLACE
from traindiff.core.site import label
from traindiff.core.summary import UNIT_ROUNDOFF

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
                path=first.path, slot=f"received{slot[1]}", order=order, kind="boundary",
                difference=size, message=_says(sent, wrong, ends, micro_steps=num_micro_steps(table)),
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
    message = (
        f"Stage {ends[1]} (rank {part.rank}) received something else than {what}stage {ends[0]} "
        f"(rank {origin.rank}) sent, in {numbers} of {micro_steps}"
    )
    other = next((one for one in sent.parts if one.summary["multiset"] == part.summary["multiset"]), None)
    if other is not None and other.micro_step != part.micro_step:
        return f"{message}: what it sent in micro-step {other.micro_step}. Was a buffer read before it was filled?"
    for dtype in ("bfloat16", "float16"):
        if size is not None and 0.15 * UNIT_ROUNDOFF[dtype] < size < 1.2 * UNIT_ROUNDOFF[dtype]:
            return f"{message}: it differs by {size:.2g} of its size, as rounding to {dtype} would make it."
    return f"{message}." if size is None else f"{message}: it differs by {size:.2g} of its size."


KIND = "ranks-disagree"


class CopiesAgree(Rule):
    """Parameters, optimizer state and reduced gradients whose copies differ between ranks, by fingerprint.

    Also random state, where a forward pass draws from it and ranks work on the same samples.

    The ranks that are alone are those outside of the largest group that agrees. Of two ranks that differ, which
    is wrong is not known.
    """

    name = "ranks-disagree"
    finds = "A rank holds another copy of a parameter, a reduced gradient or optimizer state than the others."
    kinds = ("ranks-disagree",)

    def step(self, table: Mapping[Key, Entry], *, step: int) -> Iterator[Finding]:
        """See the class."""
        for key, entry in table.items():
            if not entry.apart or not _must_agree(table, key):
                continue
            most, *others = entry.apart
            alone = sorted(rank for group in others for rank in group)
            tied = len(others[0]) == len(most)
            where = label(key.path, key.slot)
            hold = "holds" if len(alone) == 1 else "hold"
            if key.path == "rng":
                message = (
                    f"{ranks_text(alone)} {hold} another random state ({key.slot}) before the forward pass than "
                    f"{ranks_text(most, capital=False)}, with the same samples: dropout masks differ."
                )
            elif tied:
                message = (
                    f"{ranks_text(sorted([*most, *alone]))} hold different copies of {where}, which should be the same."
                )
            else:
                message = f"{ranks_text(alone)} {hold} another copy of {where} than {ranks_text(most, capital=False)}."
            rank = alone[0] if len(alone) == 1 and not tied else None
            evidence = {"ranks": [list(group) for group in entry.apart]}
            yield finding_at(entry, step=step, kind=KIND, message=message, rank=rank, evidence=evidence)


def _must_agree(table: Mapping[Key, Entry], key: Key) -> bool:
    """Whether copies of this on several ranks are the same in a correct run. Buffers may be statistics of its own."""
    if key.path == "rng":
        after = table.get(key._replace(stage="after"))
        return key.stage == "before" and after is not None and _draws(table[key], after)
    return key.phase == "optimizer" or (key.phase, key.slot) == ("param", "value") or key[:2] == ("grad", "")


def _draws(before: Entry, after: Entry) -> bool:
    """Whether on some rank a forward pass changed the state of the generator."""
    states = {(part.rank, part.micro_step): int(part.summary["fingerprint"]) for part in before.parts}
    return any(
        states.get((part.rank, part.micro_step)) not in (None, int(part.summary["fingerprint"])) for part in after.parts
    )
