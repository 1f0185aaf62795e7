"""The printed lines of what diverges in one step of a lockstep, one for each rank that sees it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from traindiff.analyse.align.exact import EXACT_KINDS
from traindiff.analyse.compare.incremental import ComparedStep
from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.distance import CLEAR, Pair, differences_by_rank, differing_ranks
from traindiff.analyse.merge.site import MergedSite, SiteKey
from traindiff.core.observation import ALL_GRADIENTS
from traindiff.core.summary import distance, nonfinite_count, norm_of, number

MOST_LINES = 8
"""Most divergences of one kind that are printed for one batch, and most ranks for each; the rest is only counted."""

_INDEX = {"PARAMETER": "param_idx", "GRADIENT": "grad_idx", "STATE": "param_idx"}
"""What a line calls the number of its parameter."""


def divergence_lines(compared: ComparedStep, *, batch: int, indices: Mapping[str, int], first: str) -> Iterator[str]:
    """A line for each divergence of a step and rank, and below the first one of each kind an indented description.

    Args:
        compared: The step.
        batch: Number of the batch in which it ended.
        indices: Number of each trainable parameter in the model's order, by path.
        first: Description of the first finding.
    """
    if compared.aligned is None:  # nothing differs
        return
    pairs = {pair.baseline.key: pair for pair in compared.aligned.aligned.pairs}
    for what, group in groupby(_in_order(_without_derived(compared.findings)), key=_what):
        found = list(group)
        looks: set[str] = set()
        for finding in found[:MOST_LINES]:
            yield from _lines(what, finding, pairs, batch=batch, indices=indices)
            if finding.kind not in looks and what != "MISALIGNED":
                yield f"  {first if finding is compared.findings[0] and first else finding.said}"
            looks.add(finding.kind)
        if len(found) > MOST_LINES:
            yield f"  The same holds for {len(found) - MOST_LINES} more."


def _without_derived(findings: Sequence[Finding]) -> list[Finding]:
    """The findings without the norm of all gradients, if it follows from a reported gradient."""
    told = any(one.phase == "grad" and one.path != ALL_GRADIENTS for one in findings)
    return [one for one in findings if not (told and one.path == ALL_GRADIENTS and one.slot == "norm")]


def _in_order(findings: Sequence[Finding]) -> list[Finding]:
    """The findings grouped by kind, kinds in the order of their first finding."""
    kinds = list(dict.fromkeys(map(_what, findings)))
    return sorted(findings, key=lambda finding: kinds.index(_what(finding)))


def _what(finding: Finding) -> str:
    if finding.kind in EXACT_KINDS:
        return "MISALIGNED"
    if finding.phase == "param" and finding.slot == "buffer":
        return "BUFFER"
    return {
        "grad": "GRADIENT", "loss": "LOSS", "forward": "ACTIVATION", "backward": "ACTIVATION", "optimizer": "STATE",
    }.get(finding.phase, "PARAMETER")  # fmt: skip


def _lines(
    what: str, finding: Finding, pairs: Mapping[SiteKey, Pair], *, batch: int, indices: Mapping[str, int]
) -> Iterator[str]:
    """The line of a divergence, once for each rank that sees it."""
    if what == "MISALIGNED":
        yield f"MISALIGNED batch={batch} {finding.said}"
        return
    fields = [f"{_INDEX[what]}={indices.get(finding.path, -1)}"] if what in _INDEX else []
    if what != "LOSS":
        fields.append(f"name={'*' if finding.path == ALL_GRADIENTS else finding.path}")
    if what in ("ACTIVATION", "STATE"):
        fields.append(f"slot={finding.slot}")
    last = [f"phase={finding.phase}"] if what == "ACTIVATION" else [f"stage={finding.stage}"] if finding.stage else []
    pair = _pair(finding, pairs)
    seen = _seen(finding, pair)
    for one in seen[:MOST_LINES]:
        where = f"rank={one.rank} batch={batch}"
        absolute, relative = one.absolute, one.relative
        if what == "LOSS" and pair is not None:
            baseline, candidate = _loss(pair.baseline, one.rank), _loss(pair.candidate, one.rank)
            where += f": base={baseline:.5e} test={candidate:.5e}"
            absolute = abs(candidate - baseline)
            relative = absolute / abs(baseline) if baseline else math.inf
        sizes = f"abs_diff={absolute:.5e} rel_diff={relative:.5e} tol={one.accepted:.5e}"
        yield " ".join([f"DIVERGED {what}", where, *fields, sizes, *last])
    if len(seen) > MOST_LINES:
        yield f"  {len(seen) - MOST_LINES} more ranks see it."


def _pair(finding: Finding, pairs: Mapping[SiteKey, Pair]) -> Pair | None:
    """The site of a finding in both runs; for an update of a parameter, the parameter after it."""
    phase, slot = ("param", "value") if finding.phase == "update" else (finding.phase, finding.slot)
    found = (pair for key, pair in pairs.items() if key[:5] == (phase, finding.stage, finding.path, slot, finding.call))
    return next(found, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """A divergence as a rank sees it.

    Attributes:
        rank: The rank.
        absolute: L2 norm of the difference.
        relative: The same relative to the baseline.
        accepted: The largest relative difference that passes.
    """

    rank: int
    absolute: float
    relative: float
    accepted: float


def _seen(finding: Finding, pair: Pair | None) -> list[_Seen]:
    """The ranks that see a divergence, with the sizes of what each one holds.

    A rank sees it if its part of the tensor differs, by more than rounding beside the largest difference, or is not
    finite. If the sides are divided differently, only the difference of the whole is known: then these are the ranks
    that hold a part, unless the difference is known to be in the rows of one of them.
    """
    whole = _whole(finding, pair)
    if pair is None or pair.baseline.shape != pair.candidate.shape:
        return [whole]
    parts = (*pair.baseline.parts, *pair.candidate.parts)
    if broken := sorted({part.rank for part in parts if int(nonfinite_count(part.summary))}):
        return [replace(whole, rank=rank) for rank in broken]
    apart = _differences_of_copies(pair) if pair.candidate.apart else {}
    held = sorted({part.rank for part in pair.candidate.parts})
    if not apart and not _all_hold_it(pair.candidate):
        apart = differences_by_rank(pair)
    largest = max(apart.values(), default=0.0)
    if not largest:
        return [replace(whole, rank=rank) for rank in differing_ranks(pair, whole.accepted) or held] or [whole]
    limit = max(whole.accepted, CLEAR * largest) if math.isfinite(largest) else whole.accepted
    return [
        replace(whole, rank=rank, absolute=size * _size_held(pair.baseline, rank), relative=size)
        if math.isfinite(size)
        else replace(whole, rank=rank)
        for rank, size in sorted(apart.items())
        if size > limit or size == largest
    ]


def _all_hold_it(entry: MergedSite) -> bool:
    """True if each rank holds the whole tensor, and not a part or a term of a sum."""
    return not (entry.summed or entry.batched) and all(
        part.shard.shape == part.shard.global_shape for part in entry.parts
    )


def _differences_of_copies(pair: Pair) -> dict[int, float]:
    """By rank: the relative difference of its copy from the baseline, of copies that should be equal."""
    size = norm_of(pair.baseline.summary)
    apart = {part.rank: float(distance(pair.baseline.summary, part.summary)) for part in pair.candidate.parts}
    return {rank: one / size if size else math.inf if one else 0.0 for rank, one in apart.items()}


def _size_held(entry: MergedSite, rank: int) -> float:
    """L2 norm of what a rank holds; of the whole if it has no part."""
    held = [norm_of(part.summary) for part in entry.parts if part.rank == rank]
    return math.hypot(*held) if held else norm_of(entry.summary)


def _loss(entry: MergedSite, rank: int) -> float:
    """A rank's loss: its terms of the mean over all ranks, as many times as there are ranks."""
    terms = [number(part.summary) for part in entry.parts if part.rank == rank]
    if not entry.summed or not terms:
        return number(entry.summary)
    return sum(terms) * len({part.rank for part in entry.parts})


def _whole(finding: Finding, pair: Pair | None) -> _Seen:
    """The sizes of the whole tensor, for the rank that the finding names, or the first one that holds a part.

    An update is judged relative to itself, but printed relative to its parameter.
    """
    held = [] if pair is None else [part.rank for part in pair.candidate.parts]
    rank = finding.rank if finding.rank is not None else min(held, default=0)
    seen = _Seen(rank=rank, absolute=finding.difference, relative=finding.difference, accepted=finding.floor)
    if pair is None or pair.baseline.shape != pair.candidate.shape:
        return seen
    baseline, candidate = pair.baseline.summary, pair.candidate.summary
    if int(nonfinite_count(baseline)) or int(nonfinite_count(candidate)):
        return replace(seen, absolute=math.nan, relative=math.nan)
    size = norm_of(baseline)
    if finding.phase == "update":
        update = finding.evidence.get("baseline_norm", 0.0)
        change = update if math.isfinite(finding.difference) else 0.0
        absolute = finding.difference * change if change else float(distance(baseline, candidate))
        accepted = finding.floor * update / size if size and update else 0.0
        return replace(seen, absolute=absolute, relative=absolute / size if size else math.inf, accepted=accepted)
    return replace(seen, absolute=finding.difference * size) if math.isfinite(finding.difference) else seen
