"""Copies on several ranks agree, and pipeline stages receive what was sent."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from traindiff.analyse.findings import Finding, micro_steps_text, ranks_text
from traindiff.analyse.merge.distance import Pair, difference
from traindiff.analyse.merge.site import MergedSite, RankPart, SiteKey, StepTable, finding_at, num_micro_steps
from traindiff.analyse.rules.rule import Rule
from traindiff.core.observation import BOUNDARY, PLACE
from traindiff.core.site import label
from traindiff.core.summary import UNIT_ROUNDOFF

_STAGE = re.compile(r"stage\[(\d{1,9})\]")
_SENT = re.compile(r"sent(\[\d+\].*)")


class BoundariesHold(Rule):
    """A pipeline stage received something else than the stage before it sent, by fingerprint.

    The finding is at the first module of the receiving stage in the order of execution.
    """

    name = "boundary"
    finds = "A stage of a pipeline received something else than the one before it sent."
    tells_runs_apart = True

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """Findings of a step."""
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
                difference=size, message=_message(sent, wrong, ends, micro_steps=num_micro_steps(table)),
                evidence={"stage": ends[1], "micro_steps": [part.micro_step for _, part, _ in wrong]},
            )  # fmt: skip


def _wrong_parts(sent: MergedSite, received: MergedSite) -> list[tuple[RankPart, RankPart, float | None]]:
    """Micro-batches that changed on the way: as they were sent, as they arrived, and their difference."""
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


def _alone(entry: MergedSite, part: RankPart) -> MergedSite:
    return MergedSite(key=entry.key, order=entry.order, dtype=entry.dtype, shape=part.shard.shape, summary=part.summary)


def _first_of_stage(table: StepTable, received: MergedSite) -> tuple[int, SiteKey]:
    """The first site after the boundary, and its place in execution order; the boundary itself if there is none."""
    place, phase = received.order // PLACE, received.key.phase
    following = (
        (entry.order, key)
        for key, entry in table.items()
        if key.phase == phase and not key.stage and entry.order // PLACE == place
    )
    order, key = min(following, default=(received.order, received.key))
    return min(order, received.order), key


def _message(
    sent: MergedSite,
    wrong: Sequence[tuple[RankPart, RankPart, float | None]],
    ends: tuple[int, int],
    *,
    micro_steps: int,
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
    """Copies of parameters, optimizer state and reduced gradients differ between ranks, by fingerprint.

    The rule also compares random state, if a forward pass draws from it and ranks work on the same samples. It names
    the ranks that are not in the largest group that agrees. If there are only two ranks, it is unknown which one is
    wrong.
    """

    name = "ranks-disagree"
    finds = "A rank holds another copy of a parameter, a reduced gradient or optimizer state than the others."
    tells_runs_apart = True

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """Findings of a step."""
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


def _must_agree(table: StepTable, key: SiteKey) -> bool:
    """True if copies on several ranks are equal in a correct run. Buffers may hold a rank's own statistics."""
    if key.path == "rng":
        after = table.get(key._replace(stage="after"))
        return key.stage == "before" and after is not None and _draws(table[key], after)
    return key.phase == "optimizer" or (key.phase, key.slot) == ("param", "value") or key[:2] == ("grad", "")


def _draws(before: MergedSite, after: MergedSite) -> bool:
    """True if a forward pass changed the state of the generator on some rank."""
    states = {(part.rank, part.micro_step): int(part.summary["fingerprint"]) for part in before.parts}
    return any(
        states.get((part.rank, part.micro_step)) not in (None, int(part.summary["fingerprint"])) for part in after.parts
    )
