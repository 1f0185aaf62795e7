"""Copies on several ranks agree, and pipeline stages receive what was sent."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from traindiff.analyse.findings import Finding, listed_text, micro_steps_text, ranks_text
from traindiff.analyse.merge.distance import Pair, best_fit, difference, rounded_to
from traindiff.analyse.merge.indexed import sites
from traindiff.analyse.merge.placed_parts import PlacedParts
from traindiff.analyse.merge.recorded_calls import contributions
from traindiff.analyse.merge.site import MergedSite, RankPart, SiteKey, StepTable, finding_at, num_micro_steps
from traindiff.analyse.rules.optimizers import moves_parameters
from traindiff.analyse.rules.rank_multiples import common_multiples, differing_copies, of_part
from traindiff.analyse.rules.ranks_apart import RanksApart
from traindiff.analyse.rules.rule import Contents, Rule, RunFacts
from traindiff.core.observation import BEFORE, BOUNDARY, PLACE
from traindiff.core.shards import Shard
from traindiff.core.site import label
from traindiff.core.summary import norm_of, number

_STAGE = re.compile(r"stage\[(\d{1,9})\]")
_SENT = re.compile(r"sent(\[\d+\].*)")


class BoundariesHold(Rule):
    """A pipeline stage received something else than the stage before it sent, by fingerprint.

    The finding is at the first module of the receiving stage in the order of execution.
    """

    name = "boundary"
    finds = "A stage of a pipeline received something else than the one before it sent."
    needs = "a pipeline of several ranks"
    tells_runs_apart = True

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return BOUNDARY in contents.stages

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """Findings of a step."""
        for key, before in sites(table, stage=BOUNDARY):
            stage, slot = _STAGE.fullmatch(key.path), _SENT.fullmatch(key.slot)
            if not stage or not slot:
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
        if (
            origin is None
            or origin.summary is None
            or part.summary is None
            or (origin.summary["fingerprint"] == part.summary["fingerprint"] and sent.dtype == received.dtype)
        ):
            continue
        pair = Pair(baseline=of_part(sent, origin), candidate=of_part(received, part))
        found.append((origin, part, difference(pair)))
    return found


def _first_of_stage(table: StepTable, received: MergedSite) -> tuple[int, SiteKey]:
    """The first site after the boundary, and its place in execution order; the boundary itself if there is none."""
    place, phase = received.order // PLACE, received.key.phase
    following = ((entry.order, key) for key, entry in sites(table, phase, stage="") if entry.order // PLACE == place)
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
    others = (one for one in sent.parts if one.summary is not None)
    other = next((one for one in others if one.summary["multiset"] == part.summary["multiset"]), None)
    if other is not None and other.micro_step != part.micro_step:
        return f"{message}: what it sent in micro-step {other.micro_step}. Was a buffer read before it was filled?"
    if dtype := rounded_to(Pair(baseline=of_part(sent, origin), candidate=of_part(sent, part))):
        return f"{message}: it differs by {size:.2g} of its size, as rounding to {dtype} would make it."
    return f"{message}." if size is None else f"{message}: it differs by {size:.2g} of its size."


KIND = "ranks-disagree"


class CopiesAgree(Rule):
    """Copies of parameters, optimizer state and reduced gradients differ between ranks, by fingerprint.

    The rule also compares random state, if a forward pass draws from it and ranks work on the same samples. It names
    the ranks that are not in the largest group that agrees. If there are only two ranks, it is unknown which one is
    wrong. It also says how the copies differ: one is zero, that of the step before, a multiple of the other, or a
    gradient that was not reduced.

    Parameters that DistributedDataParallel was told to ignore are each rank's own. If nothing is known that reduces
    gradients in every step (several ranks by hand, or a communication hook), a training may let ranks train apart, and
    average their parameters now and then (local SGD). So these findings wait until the parameters are equal on all
    ranks again; if that happens, they are a note. It is none if the gradients of any parameter are the same on all
    ranks.
    """

    name = "ranks-disagree"
    finds = "A rank holds another copy of a parameter, a reduced gradient or optimizer state than the others."
    needs = "several ranks"
    tells_runs_apart = True

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return contents.facts.num_ranks > 1

    def begin(self) -> None:
        """Nothing was seen so far."""
        self._before: dict[SiteKey, dict[Shard, int]] = {}
        self._apart = RanksApart(self.facts)
        self._own: set[str] = set()

    def learn(self, facts: RunFacts) -> None:
        """`Rule.learn`."""
        super().learn(facts)
        self._apart.learn(facts)

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """Findings of a step."""
        self._apart.look(table, step=step)
        for key, entry in sites(table, "param", stage=BEFORE):
            if key.slot == "value":
                self._before[key._replace(stage="")] = _bits(entry)
        for finding in self._disagreements(table, step=step):
            if finding.path in self.facts.not_reduced:
                self._own.add(finding.path)
            else:
                yield from self._apart.hold(finding)
        for key, entry in sites(table, "grad", "param", stage=""):
            if (key.phase, key.slot) in (("param", "value"), ("grad", "grad")):
                self._before[key] = _bits(entry)

    def end(self) -> Iterator[Finding]:
        """Findings about ranks that did not become equal again."""
        return self._apart.left()

    def notes(self) -> Iterator[str]:
        """What ranks hold apart on purpose."""
        if self._own:
            yield (
                f"Not compared between ranks, because DistributedDataParallel ignores them: "
                f"{listed_text(sorted(self._own), 'parameter')}."
            )
        yield from self._apart.notes()

    def _disagreements(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        common = common_multiples(table)
        for key, entry in table.items():
            if not entry.apart or not _must_agree(table, key) or (common is not None and key in common.sites):
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
            if key.phase == "optimizer":
                message += self._without_steps(step)
            if key.path != "rng":
                message += _how(table, entry, self._before.get(key, {}))
            if common is not None and key[:2] == ("grad", ""):
                message += common.aside
            rank = alone[0] if len(alone) == 1 and not tied else None
            evidence = {"ranks": [list(group) for group in entry.apart]}
            yield finding_at(entry, step=step, kind=KIND, message=message, rank=rank, evidence=evidence)

    def _without_steps(self, step: int) -> str:
        """The reason why the state of an optimizer lags behind on some ranks, as a sentence; empty if there is none."""
        lagging = [rank for rank, found in self.facts.joined.items() if any(one.steps.start < step for one in found)]
        if not lagging:
            return ""
        return (
            f" {ranks_text(lagging)} had no inputs for some steps before: torch.distributed.algorithms.Join copies the "
            "parameters to such ranks at its end, and not the optimizer's state."
        )


def _bits(entry: MergedSite) -> dict[Shard, int]:
    """Fingerprints of the copies that all ranks hold, by shard; of copies that differ, of none."""
    if entry.apart or entry.unobserved:
        return {}
    if type(entry.parts) is PlacedParts:
        places, known = entry.parts.places, entry.parts.known
        return {places[at].shard: int(summary["fingerprint"]) for at, summary in known.items()}
    return {part.shard: int(part.summary["fingerprint"]) for part in entry.parts}


def _how(table: StepTable, entry: MergedSite, before: Mapping[Shard, int]) -> str:
    """A sentence about how two copies differ that should be the same; empty for whole numbers.

    Args:
        table: The step.
        entry: The site.
        before: Fingerprints of the copies that all ranks held a step before, by shard; empty if they are not known.
    """
    usual, odd = differing_copies(entry)
    pair = Pair(baseline=of_part(entry, usual), candidate=of_part(entry, odd))
    if int(usual.summary["count"]) == 1:
        values = (f"{number(one.summary):.6g} on rank {one.rank}" for one in (usual, odd))
        return f" It is {' and '.join(values)}."
    for one in (odd, usual):
        if norm_of(one.summary) == 0.0:
            return f" What rank {one.rank} holds is all zero."
    # Where most ranks have moved, the odd one may have rested. Of two ranks, either may, if a step was to move it.
    tied = len(entry.apart[0]) == len(entry.apart[1])
    may_rest = (odd, usual) if tied and _was_to_move(table, entry) else (odd,) if not tied else ()
    for one in may_rest:
        if before.get(one.shard) == int(one.summary["fingerprint"]):
            why = "the step's update did not reach it" if entry.key.phase == "param" else "one step late"
            return f" What rank {one.rank} holds is the copy of the step before: {why}."
    if entry.key.phase == "grad":
        own = [part for part in (odd, usual) if _is_its_own(table, entry, part)]
        if own:
            held = "hold is their own contribution" if len(own) > 1 else "holds is its own contribution"
            return f" What {ranks_text(sorted(one.rank for one in own), capital=False)} {held} alone: not reduced?"
    factor, left_over = best_fit(pair.baseline, pair.candidate)
    if left_over <= min(_FITS, _OF_A_FACTOR * abs(factor - 1.0)):
        why = " Were gradients clipped or scaled on some ranks only?" if entry.key.phase == "grad" else ""
        return f" What rank {odd.rank} holds is {factor:.4g} x what rank {usual.rank} holds.{why}"
    size = difference(pair)
    unreduced = size is not None and size >= _UNREDUCED and entry.key.phase == "grad"
    if unreduced and len(entry.apart) == len({part.rank for part in entry.parts}):
        return " No two ranks hold the same: was it never reduced?"
    return "" if size is None else f" They differ by {size:.2g} of their size (relative L2)."


def _was_to_move(table: StepTable, entry: MergedSite) -> bool:
    """True if a step was to move a parameter, which has a gradient; always true of a gradient."""
    if entry.key.phase != "param":
        return True
    gradient = table.get(SiteKey("grad", "", entry.key.path, "grad"))
    has_one = gradient is not None and not gradient.unobserved and norm_of(gradient.summary) > 0.0
    return has_one and moves_parameters(table)


_UNREDUCED = 0.1
"""Gradients of other samples differ by more than this part of their size."""

_OF_A_FACTOR = 0.1
"""Part of a difference that a factor may leave unexplained."""

_FITS = 0.01
"""Part of a copy that a multiple of another one, or of a rank's own contribution, may leave."""


def _is_its_own(table: StepTable, entry: MergedSite, part: RankPart) -> bool:
    """True if a rank's gradient is a multiple of what its own micro-batches contributed, and not of all ranks' sum."""
    found = contributions(table).get(entry.key.path, {})
    own = [one["sketch"] for (_, rank), one in found.items() if rank == part.rank]
    if not own or len(own) == len(found):
        return False
    left = [_left_over(np.sum(terms, axis=0), part.summary["sketch"]) for terms in (
        own, [one["sketch"] for one in found.values()],
    )]  # fmt: skip
    return left[0] <= _FITS < left[1]


def _left_over(term: NDArray[np.float64], target: NDArray[np.float64]) -> float:
    """What the best multiple of a term leaves of a target, relative to the target."""
    power, size = float(term @ term), float(np.linalg.norm(target))
    if not power or not size:
        return 1.0
    return float(np.linalg.norm(target - float(term @ target) / power * term)) / size


def _must_agree(table: StepTable, key: SiteKey) -> bool:
    """True if copies on several ranks are equal in a correct run. Buffers may hold a rank's own statistics."""
    if key.path == "rng":
        after = table.get(key._replace(stage="after"))
        draws = key.stage == "before" and after is not None and _draws(table[key], after)
        return draws and not _have_other_batches(table)
    return key.phase == "optimizer" or (key.phase, key.slot) == ("param", "value") or key[:2] == ("grad", "")


def _have_other_batches(table: StepTable) -> bool:
    """True if ranks that should work on the same samples were given different ones, or may have been."""
    batches = [entry for key, entry in sites(table, "batch", stage="") if key.path != "rng"]
    return any(entry.apart or entry.unobserved for entry in batches)


def _draws(before: MergedSite, after: MergedSite) -> bool:
    """True if a forward pass changed the state of the generator on some rank."""
    states = {(part.rank, part.micro_step): int(part.summary["fingerprint"]) for part in before.parts}
    return any(
        states.get((part.rank, part.micro_step)) not in (None, int(part.summary["fingerprint"])) for part in after.parts
    )
