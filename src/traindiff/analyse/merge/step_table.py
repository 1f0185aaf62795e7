"""Merge the observations of a step, over ranks and micro-steps, into one entry per site."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.analyse.merge.site import MergedSite, Part, RankPart, SiteKey
from traindiff.core.observation import LOSS_SCALE, PLACE, RECOMPUTED, SAMPLE, Observation
from traindiff.core.shards import OPEN, Shard
from traindiff.core.site import ROOT
from traindiff.core.summary import Summaries, add, distance, empty, merge, number, scale
from traindiff.storage.spilled import SPILLED

_AFTER_ALL = 1 << 60
"""Added to the order of logged scalars: they follow from the computation, and nothing follows from them."""


def step_table(parts: Iterable[Part]) -> dict[SiteKey, MergedSite]:
    """Sites of one step by key, in execution order."""
    by_site: dict[tuple[Any, ...], list[Part]] = {}
    for part in _relative(unscaled(parts)):
        by_site.setdefault(_place_of(part[0]), []).append(part)
    gaps = Gaps()
    entries = [entry for same in by_site.values() for entry in merged_site(site_key(same[0][0]), same, gaps)]
    entries.sort(key=lambda entry: entry.order)
    return {entry.key: entry for entry in entries}


def site_key(seen: Observation) -> SiteKey:
    """Key of the site of an observation, over all micro-steps."""
    return SiteKey(*_place_of(seen), 0)


_place_of: Callable[[Observation], tuple[str, str, str, str, int]] = attrgetter(*SiteKey._fields[:-1])
"""All fields of the key of an observation's site but the last one: quicker to compare, of thousands for each step."""

UNKNOWN = "it is multiplied by a loss scale that was not observed"
"""Why a scaled tensor has no numbers if its loss scale was not observed."""


def unscaled(parts: Iterable[Part]) -> list[Part]:
    """The observations of a step, whose `factor` includes the loss scale for tensors that are scaled."""
    parts = list(parts)
    if not any(seen.scaled for seen, _, _ in parts):
        return parts
    scales: dict[int, dict[int, float]] = {}
    for seen, rank, summary in parts:
        if (seen.phase, seen.path) == ("loss", LOSS_SCALE) and not seen.unobserved:
            scales.setdefault(rank, {})[seen.micro_step] = number(summary)
    return [part if not part[0].scaled or part[0].unobserved else _unscaled(part, scales) for part in parts]


def _unscaled(part: Part, scales: Mapping[int, Mapping[int, float]]) -> Part:
    """A scaled observation with its loss scale."""
    seen, rank, summary = part
    if scale := _scale_at(scales, rank, seen.micro_step):
        return seen._replace(factor=seen.factor * scale), rank, summary
    return seen._replace(unobserved=UNKNOWN), rank, summary


def _scale_at(scales: Mapping[int, Mapping[int, float]], rank: int, micro_step: int) -> float | None:
    """The loss scale of a rank in a micro-step, or the latest before it: it changes between steps only."""
    own = scales.get(rank, {})
    before = [number for number in own if number <= micro_step]
    if before:
        return own[max(before)]
    return next((scale for other in scales.values() for scale in other.values()), None)


def _relative(found: list[Part]) -> list[Part]:
    """The parts, with summaries relative to the global loss; the list is changed."""
    scaled = [row for row, (seen, _, _) in enumerate(found) if seen.factor != 1.0 and not seen.unobserved]
    if scaled:
        factors = np.array([found[row][0].factor for row in scaled])
        relative = scaled_rows([found[row][2] for row in scaled], 1.0 / factors, of=len(found))
        for row, summary in zip(scaled, relative, strict=True):
            found[row] = (*found[row][:2], summary)
    return found


_AT_ONCE = 1 << 12
"""Summaries that are scaled at once: five megabytes of them."""


def scaled_rows(summaries: Sequence[Any] | Summaries, factors: NDArray[np.float64], *, of: int) -> Summaries:
    """Each summary scaled by a factor of its own.

    Args:
        summaries: The summaries.
        factors: One for each.
        of: Number of summaries of the step, over all ranks.
    """
    found = SPILLED.empty(len(factors), of=of)
    for first in range(0, len(factors), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        found[part] = scale(summaries[part], factors[part])
    return found


def merged_site(key: SiteKey, parts: list[Part], gaps: Gaps) -> list[MergedSite]:
    """The entries of a site, from all its parts in a step: one as a rule, or one per micro-step.

    Args:
        key: See `site_key`.
        parts: With summaries relative to the global loss.
        gaps: What is known of the gaps of other sites.
    """
    if key.phase in ("forward", "backward"):
        parts = _of_last_stage(key, parts)
    parts.sort(key=lambda part: (part[0].micro_step, part[1], part[0].order))
    first = parts[0][0]
    missing = next((seen.unobserved for seen, _, _ in parts if seen.unobserved), "")
    if missing:
        lacking = [part for part in parts if part[0].unobserved]
        return [_entry(key, lacking, summary=empty(), shape=(), unobserved=missing)]
    if key.phase in ("batch", "forward", "backward") and key.stage != SAMPLE and (uneven := _uneven(parts)):
        entries = [_whole(key, same, None) for same in uneven]
        return [replace(entry, key=key._replace(micro_step=number)) for number, entry in enumerate(entries)]
    if first.merge == "mean":
        terms = _without_copies(parts)
        weights = np.array([seen.weight for seen, _, _ in terms])
        total = weights.sum() or 1.0
        summary = add([summary for _, _, summary in terms], weights / total)
        return [_entry(key, parts, summary=summary, shape=first.shard.shape, exact=False, summed=True)]
    if first.merge == "sum" or first.shard.batched or key.stage == SAMPLE:
        return [_whole(key, parts, gaps)]
    by_micro_step: dict[int, list[Part]] = {}
    for part in parts:
        by_micro_step.setdefault(part[0].micro_step, []).append(part)
    return _per_micro_step(key, [_whole(key, same, gaps) for same in by_micro_step.values()])


def _uneven(parts: Sequence[Part]) -> list[list[Part]]:
    """Groups of parts that do not form one tensor: micro-batches that are padded to different lengths, or choose rows.

    Empty if all parts have the same shape but for the batch axis, as a rule. Also empty if ranks that work on the same
    samples disagree on the shape.
    """
    groups: dict[tuple[object, ...], list[Part]] = {}
    for part in parts:
        seen = part[0]
        shard = seen.shard
        shape = shard.global_shape[1:] if shard.batched else shard.global_shape
        groups.setdefault((seen.micro_step, seen.merge, shard.batched, shape), []).append(part)
    if len({key[1:] for key in groups}) < 2:
        return []
    samples = [{(seen.micro_step, seen.term) for seen, _, _ in same} for same in groups.values()]
    if sum(map(len, samples)) > len(set().union(*samples)):
        return []
    return list(groups.values())


def _of_last_stage(key: SiteKey, parts: list[Part]) -> list[Part]:
    """If several pipeline stages hold a part of a module: the parts of the stage that returns its output."""
    places = {seen.order // PLACE for seen, _, _ in parts}
    if len(places) == 1:
        return parts
    last = min(places) if key.phase == "backward" or key.stage == RECOMPUTED else max(places)
    return [part for part in parts if part[0].order // PLACE == last]


def _whole(key: SiteKey, parts: Sequence[Part], gaps: Gaps | None) -> MergedSite:
    """A whole tensor from its shards, from copies of shards on several ranks, and from terms of sums.

    Args:
        key: Of the tensor.
        parts: Its parts.
        gaps: Tells what they leave out; None if these are not all parts of the site in this step.
    """
    boxes: dict[Shard, list[Part]] = {}
    for part in parts:
        boxes.setdefault(part[0].shard, []).append(part)
    first = parts[0][0]
    summed = first.merge == "sum"
    summaries: list[Any] = []
    apart: tuple[tuple[int, ...], ...] = ()
    spread, unknown = 0.0, ""
    if len(boxes) == len(parts):  # no copies, and no terms
        summaries = [summary for _, _, summary in parts]
    for box in () if summaries else boxes.values():
        same = _latest(box) if key.phase in ("grad", "optimizer", "param") and not summed else box
        if key.phase in ("forward", "backward", "loss"):
            unknown = unknown or not_placed(same)
        if summed:
            terms = _without_copies(same)
            summaries.append(add([one for _, _, one in terms]) if len(terms) > 1 else terms[0][2])
            continue
        judged = (
            key.phase in ("forward", "backward") or key.slot == "buffer"
        )  # differences between other copies are findings themselves
        summaries.append((_farthest(same) if judged else same[0])[2])
        for copies in _by_term(same) if key.path == "rng" else [same]:
            found = _apart(copies)
            spread = max(spread, _spread(copies)) if found else spread
            apart = apart or found
    summary = summaries[0] if len(summaries) == 1 else merge(summaries)
    shape = _rows_known([same[0] for same in boxes.values()])
    factors = {seen.factor for seen, _, _ in parts}
    return _entry(
        key,
        parts,
        summary=summary,
        shape=shape,
        exact=len(factors) == 1 and not (summed and len(parts) > len(boxes)),
        factor=factors.pop() if len(factors) == 1 else 1.0,
        apart=apart,
        spread=spread,
        batched=first.shard.batched,
        summed=summed,
        # Replays cover only a range of each parameter.
        unobserved=""
        if key.phase == "update" or key.stage == SAMPLE
        else unknown or ("" if gaps is None else gaps.of(shape, boxes)),
    )


def _without_copies(parts: Sequence[Part]) -> list[Part]:
    """Each term of a sum or mean once: ranks that work on the same samples have copies of it."""
    holder: dict[tuple[int, int], int] = {}
    for seen, rank, _ in parts:
        holder.setdefault((seen.micro_step, seen.term), rank)
    return [part for part in parts if holder[part[0].micro_step, part[0].term] == part[1]]


def _latest(parts: list[Part]) -> list[Part]:
    """What each rank recorded last: optimizers that hold the same parameter step one after the other."""
    if len({rank for _, rank, _ in parts}) == len(parts):
        return parts
    by_rank: dict[int, Part] = {}
    for part in sorted(parts, key=lambda part: part[0].order):
        by_rank[part[1]] = part
    return list(by_rank.values())


def _by_term(parts: Sequence[Part]) -> list[list[Part]]:
    """Parts grouped by the samples that their ranks work on."""
    found: dict[int, list[Part]] = {}
    for part in parts:
        found.setdefault(part[0].term, []).append(part)
    return list(found.values())


def _apart(copies: Sequence[Part]) -> tuple[tuple[int, ...], ...]:
    """Groups of ranks that hold equal copies, the largest first; empty if all copies are equal."""
    if len(copies) == 1:
        return ()
    ranks: dict[int, list[int]] = {}
    for _, rank, summary in copies:
        ranks.setdefault(int(summary["fingerprint"]), []).append(rank)
    if len(ranks) == 1:
        return ()
    return tuple(tuple(same) for same in sorted(ranks.values(), key=lambda same: (-len(same), same)))


def _spread(copies: Sequence[Part]) -> float:
    """The largest L2 distance between the first copy and another one."""
    return max(float(distance(copies[0][2], other)) for _, _, other in copies[1:])


def _farthest(copies: Sequence[Part]) -> Part:
    """Among copies that should be equal, the one farthest from the copy that most ranks hold."""
    groups = _apart(copies) if len(copies) > 1 else ()
    if not groups:
        return copies[0]
    by_rank = {rank: (seen, rank, summary) for seen, rank, summary in copies}
    most = by_rank[groups[0][0]][2]
    return max((by_rank[same[0]] for same in groups[1:]), key=lambda part: float(distance(most, part[2])))


def _per_micro_step(key: SiteKey, entries: list[MergedSite]) -> list[MergedSite]:
    """A tensor that is whole in each micro-step: one entry if it never changes, else one per micro-step."""
    if len({int(entry.summary["fingerprint"]) for entry in entries}) == 1:
        return entries[:1]
    return [replace(entry, key=key._replace(micro_step=number)) for number, entry in enumerate(entries)]


def _rows_known(parts: Sequence[Part]) -> tuple[int, ...]:
    shard = parts[0][0].shard
    if not shard.batched:
        return shard.global_shape
    batched = (seen.shard for seen, _, _ in parts if seen.shard.batched)  # ranks may disagree
    rows = sum({one.offset[0]: one.shape[0] for one in batched}.values())
    return tuple(rows if length == OPEN else length for length in shard.global_shape)


def _entry(
    key: SiteKey, parts: Sequence[Part], *, summary: Any, shape: tuple[int, ...], unobserved: str = "", **about: Any
) -> MergedSite:
    first = parts[0][0]
    logged = first.phase == "loss" and first.slot == "logged"
    return MergedSite(
        key=key,
        order=first.order + (_AFTER_ALL if logged else 0),
        dtype=first.dtype,
        shape=shape,
        summary=summary,
        parts=tuple(
            map(_rank_part, [(seen.micro_step, rank, seen.shard, one, seen.term) for seen, rank, one in parts])
        ),
        unobserved=unobserved,
        **about,
    )


_rank_part: Callable[[tuple[Any, ...]], RankPart] = partial(tuple.__new__, RankPart)
"""A `RankPart` from its fields; a third of the time, of thousands for each step."""


class Gaps:
    """What the shards of tensors leave out. Most tensors of a step share the objects that say how they are divided."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[list[Shard], str]] = {}  # the shards are kept: ids are of objects

    def of(self, shape: tuple[int, ...], shards: Collection[Shard]) -> str:
        """`gap` of a tensor."""
        key = (shape, *map(id, shards))
        if key not in self._known:
            self._known[key] = [*shards], gap(shape, shards)
        return self._known[key][1]


_MOST_RUNS = 1 << 20
"""Limit of blocks of adjacent rows, over all ranks. Each sample of a batch may be a block if rows are spaced."""


def gap(shape: Sequence[int], shards: Collection[Shard]) -> str:
    """Why the shards of a tensor do not form the whole tensor; empty if they do."""
    shapes = {shard.global_shape[1:] if shard.batched else shard.global_shape for shard in shards}
    if len(shapes) > 1:
        one, other, *_ = sorted(shapes)
        return f"ranks disagree on the shape of the whole: {list(one)} or {list(other)}"
    batched = any(shard.batched for shard in shards)
    return (_misplaced_rows(shards) if batched else "") or _uncovered(shape, shards)


def not_placed(parts: Sequence[tuple[Observation, int, Any]]) -> str:
    """The reason why ranks hold different values of one shard of an activation or a loss; empty if they do not.

    Args:
        parts: Observation, rank and summary of each part.
    """
    if len(parts) == 1:
        return ""
    first = parts[0][0]
    summed = first.merge == "sum"
    values: dict[tuple[int, int], set[int]] = {}
    for seen, _, summary in parts:
        values.setdefault((seen.micro_step, seen.term if summed else 0), set()).add(int(summary["fingerprint"]))
    are_copies = not summed and len({seen.term for seen, _, _ in parts}) == 1
    if are_copies or all(len(same) == 1 for same in values.values()):
        return ""
    if first.phase == "loss":
        return "ranks hold different values of it, and how these combine is not known"
    return (
        "ranks hold different values of it, and which part of the whole these are is not known: declare its "
        f'batch axis with record(batch_axis={{"{first.path or ROOT}": ...}}) or, where ranks divide the model, which '
        f'part each has with record(shards=[traindiff.shard("{first.path or ROOT}", dim=..., axis=...)])'
    )


def _misplaced_rows(shards: Iterable[Shard]) -> str:
    """Why the rows of ranks and micro-batches do not form a batch; empty if they do."""
    shards = [shard for shard in shards if shard.batched]  # ranks may disagree
    if sum(shard.shape[0] // shard.spacing[0] for shard in shards if shard.spacing) > _MOST_RUNS:
        return f"its rows lie in more than {_MOST_RUNS:,} places"
    rows = sorted({run for shard in shards for run in _runs_of_rows(shard) if run[1]})
    ends = [0, *(first + count for first, count in rows)]
    for (first, _), end in zip(rows, ends, strict=False):
        if first != end:
            if first < end:
                return "rows of batches of different sizes overlap, so which sample is which is not known"
            return "its rows leave gaps (batches differ in size, or one was not seen), so their places are not known"
    return ""


def _runs_of_rows(shard: Shard) -> Iterable[tuple[int, int]]:
    """First row and length of each block of adjacent rows."""
    if shard.spacing is None:
        return [(shard.offset[0], shard.shape[0])]
    together, apart = shard.spacing
    return [(shard.offset[0] + number * apart, together) for number in range(shard.shape[0] // together)]


def _uncovered(shape: Sequence[int], shards: Iterable[Shard]) -> str:
    """Why the sizes of shards do not add up to the whole; empty if they do."""
    whole, held = prod(shape), sum(shard.size for shard in shards)
    if held < whole:
        return f"its shards leave {whole - held:,} of its {whole:,} elements out"
    return f"its shards overlap in {held - whole:,} of its {whole:,} elements" if held > whole else ""
