"""How far the two sides of a pair are apart, as a whole and rank by rank."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from traindiff.analyse.merge.placed_parts import are_known, hold_same_parts
from traindiff.analyse.merge.rank_codes import Codes, codes_of, differing_rank, terms_of
from traindiff.analyse.merge.site import MergedSite, RankPart
from traindiff.core.shards import BUCKETS, Shard
from traindiff.core.summary import UNIT_ROUNDOFF, distance, finite_count, nonfinite_count, norm_of, rounding, scale


@dataclass(slots=True, kw_only=True)
class Pair:
    """One site in both runs. What is measured of it is kept, so neither side may be replaced.

    Attributes:
        baseline: The baseline's side.
        candidate: The candidate's side.
        known_bits: What `equal_bits` found; None before.
        known_apart: Distance of the sketches; None before it was measured.
        known_difference: What `difference` found, alone in a tuple; None before.
    """

    baseline: MergedSite
    candidate: MergedSite
    known_bits: bool | None = field(default=None, init=False, repr=False, compare=False)
    known_apart: float | None = field(default=None, init=False, repr=False, compare=False)
    known_difference: tuple[float | None] | None = field(default=None, init=False, repr=False, compare=False)


def measure(pairs: Iterable[Pair]) -> None:
    """Measure the distances of the sketches of many pairs at once, for `difference`."""
    apart = [pair for pair in pairs if pair.known_apart is None and not equal_bits(pair)]
    if apart:
        sides = (
            [pair.baseline.summary["sketch"] for pair in apart],
            [pair.candidate.summary["sketch"] for pair in apart],
        )
        found = distance(*({"sketch": np.array(sketches)} for sketches in sides))
        for pair, size in zip(apart, found.tolist(), strict=True):
            pair.known_apart = size


def equal_bits(pair: Pair) -> bool:
    """True if both sides are known to hold the same bits, or to follow from the same bits."""
    if pair.known_bits is None:
        pair.known_bits = _have_equal_bits(pair)
    return pair.known_bits


def _have_equal_bits(pair: Pair) -> bool:
    baseline, candidate = pair.baseline, pair.candidate
    if baseline.origin or candidate.origin:
        return baseline.origin == candidate.origin
    return bool(
        baseline.exact
        and candidate.exact
        and baseline.dtype == candidate.dtype
        and baseline.shape == candidate.shape
        and baseline.factor == candidate.factor
        and baseline.summary["fingerprint"] == candidate.summary["fingerprint"]
    )


_ROUNDINGS = 64.0
"""Unit roundoffs that a parameter may be apart in two runs of one training, some steps after rounding parted them."""


def are_near(one: MergedSite, other: MergedSite | None) -> bool:
    """True if two runs have the same values of a parameter, but for rounding."""
    if other is None or one.unobserved or other.unobserved or one.shape != other.shape:
        return False
    return float(distance(one.summary, other.summary)) <= _ROUNDINGS * rounding(one.dtype) * norm_of(one.summary)


def same_bits(pair: Pair) -> bool | None:
    """Whether both sides hold the same bits; None if the recordings do not tell.

    A sum or a mean has no fingerprint, so its terms are compared one by one. Nothing is known of runs that divide it
    among other micro-steps or ranks, and of tensors under different scales. Numbers that traindiff derives have the
    same bits if they follow from the same bits; otherwise nothing is known of them.
    """
    baseline, candidate = pair.baseline, pair.candidate
    if equal_bits(pair):
        return True
    if baseline.factor != candidate.factor or baseline.key.phase == "update":
        return None
    if baseline.exact and candidate.exact:
        return False
    if baseline.exact or candidate.exact:
        return None
    if baseline.abridged is not None or candidate.abridged is not None:
        return _same_terms(pair)
    held = [_by_place(entry.parts) for entry in (baseline, candidate)]
    if not held[0] or held[0].keys() != held[1].keys():
        return None
    if baseline.dtype != candidate.dtype:
        return False
    terms = ((own.summary["fingerprint"], held[1][place].summary["fingerprint"]) for place, own in held[0].items())
    if all(own == other for own, other in terms):
        return True if difference(pair) == 0.0 else None
    return False


def _same_terms(pair: Pair) -> bool | None:
    """The same if one of the runs is compact: of the bits of its terms, a hash is known."""
    sides = (pair.baseline, pair.candidate)
    if not pair.baseline.parts or not hold_same_parts(pair.baseline.parts, pair.candidate.parts):
        return None
    if pair.baseline.dtype != pair.candidate.dtype:
        return False
    hashes = {terms_of(one.parts) if one.abridged is None else one.abridged.terms for one in sides}
    return False if len(hashes) > 1 else True if difference(pair) == 0.0 else None


def is_transposed(pair: Pair) -> bool:
    """True if both sides, of a parameter or a tensor that belongs to one, have the same axes in another order."""
    baseline, candidate = pair.baseline, pair.candidate
    return (
        baseline.key.phase in ("grad", "optimizer", "update", "param")
        and baseline.shape != candidate.shape
        and sorted(baseline.shape) == sorted(candidate.shape)
    )


def difference(pair: Pair) -> float | None:
    """Relative L2 difference, `||candidate - baseline|| / ||baseline||`, from the sketches.

    If the places of elements are not known, it is the smallest difference that explains how norms and sums differ: a
    difference of norm d changes the norm of n elements by at most d, and their sum by at most sqrt(n) d.

    If one run holds a parameter transposed, sketches cannot be subtracted: then it is the difference of the norms,
    which do not depend on the order of the elements.

    Returns:
        0 for equal bits; inf if shapes or non-finite elements differ, or if only the baseline is all zero; None for
        whole numbers that differ, which have no distance.
    """
    if pair.known_difference is None:
        pair.known_difference = (_difference(pair),)
    return pair.known_difference[0]


def _difference(pair: Pair) -> float | None:
    baseline, candidate = pair.baseline, pair.candidate
    if equal_bits(pair):
        return 0.0
    if not (baseline.placed and candidate.placed):
        return _unplaced_difference(pair)
    if baseline.dtype not in UNIT_ROUNDOFF or candidate.dtype not in UNIT_ROUNDOFF:
        return None
    if is_transposed(pair) and int(baseline.summary["nan"]) == int(candidate.summary["nan"]):
        return _transposed_difference(pair)
    if baseline.shape != candidate.shape or int(baseline.summary["nan"]) != int(candidate.summary["nan"]):
        return math.inf
    if baseline.exact and candidate.exact and baseline.summary["nonfinite"] != candidate.summary["nonfinite"]:
        return math.inf
    if pair.known_apart is None:
        pair.known_apart = float(distance(baseline.summary, candidate.summary))
    apart, size = pair.known_apart, norm_of(baseline.summary)
    if not math.isfinite(apart):  # moments that overflowed float64
        return math.inf
    return apart / size if size else math.inf if apart else 0.0


def size_of(pair: Pair) -> float:
    """The `difference` of a pair; inf for whole numbers that differ."""
    size = difference(pair)
    return math.inf if size is None else size


ESTIMATED_NORMS = 1.0
"""Norms of updates are estimated from sketches: up to this relative difference, two of them count as equal. The
standard deviation of log2 of their ratio is sqrt(2) * 0.126, so this is more than five of them."""

ESTIMATED_PERMUTED_NORMS = 0.5
"""The same where the values of one run are in another order, and only whether the runs learn differently is asked."""


def norms_apart(pair: Pair) -> float:
    """Relative difference of the two norms, which do not depend on the order of the elements."""
    baseline, candidate = norm_of(pair.baseline.summary), norm_of(pair.candidate.summary)
    return abs(candidate - baseline) / baseline if baseline else math.inf if candidate else 0.0


def num_losses(pair: Pair) -> tuple[int, int]:
    """Number of tensors on which one rank of each run calls `backward` in a step; zeros for anything but a loss."""
    if pair.baseline.key.phase != "loss":
        return 0, 0
    baseline, candidate = (
        max(Counter(part.rank for part in one.parts).values(), default=0) for one in (pair.baseline, pair.candidate)
    )
    return baseline, candidate


def has_other_losses(pair: Pair) -> bool:
    """True for a sum of losses if the runs call `backward` on different numbers of them."""
    baseline, candidate = num_losses(pair)
    return baseline != candidate


def _transposed_difference(pair: Pair) -> float:
    apart = norms_apart(pair)
    if not math.isfinite(apart):
        return math.inf
    estimated = not (pair.baseline.exact and pair.candidate.exact)
    return 0.0 if estimated and apart <= ESTIMATED_NORMS else apart


def has_estimated_norm(entry: MergedSite) -> bool:
    """True if the norm of a site without places was estimated from sketches; then its own sketch is not zero."""
    return not entry.placed and bool(entry.summary["sketch"].any())


def _unplaced_difference(pair: Pair) -> float:
    baseline, candidate = pair.baseline.summary, pair.candidate.summary
    if any(int(baseline[name]) != int(candidate[name]) for name in ("count", *_NONFINITE)):
        return math.inf
    size, moved = norm_of(baseline), abs(float(candidate["sum"] - baseline["sum"]))
    other = norm_of(candidate)
    longer = abs(other - size)
    if has_estimated_norm(pair.baseline) or has_estimated_norm(pair.candidate):
        longer = 0.0 if max(size, other) <= (1.0 + ESTIMATED_NORMS) * min(size, other) else longer
        # The update of an element with almost no gradient is as large as that of any other, and rounding turns it.
        moved = 0.0 if pair.baseline.key.phase == "update" else moved
    apart = max(longer, moved / math.sqrt(max(1, int(baseline["count"]))))
    return apart / size if size else math.inf if apart else 0.0


_NONFINITE = ("nan", "positive_infinity", "negative_infinity")


def rescaled(pair: Pair, factor: float) -> Pair:
    """The pair with the baseline multiplied by a factor. The bits of the product are not known."""
    summary = scale(pair.baseline.summary, abs(factor))
    if factor < 0:
        summary["sum"], summary["sketch"] = -summary["sum"], -summary["sketch"]
    return Pair(baseline=replace(pair.baseline, summary=summary, exact=False, origin=()), candidate=pair.candidate)


def best_fit(baseline: MergedSite, candidate: MergedSite) -> tuple[float, float]:
    """The s that minimizes `||candidate - s * baseline||`, and the relative size of the remainder."""
    b, c = baseline.summary["sketch"], candidate.summary["sketch"]
    power = float(b @ b)
    if power == 0.0:
        return 0.0, 1.0
    s = float(b @ c) / power
    size = float(np.sqrt(c @ c))
    return s, float(np.sqrt(np.square(c - s * b).sum())) / size if size else 0.0


_ROUNDED_ELEMENTS = 64
"""With fewer elements, rounding cannot be told from other differences of its size."""


def differs_at_random(pair: Pair) -> bool:
    """True if two tensors of some size differ as rounding makes them differ.

    Rounding errors are independent and as often up as down: they add up to no more than a few of their norms, and no
    multiple of the baseline explains a part of them. A wrong eps or a kernel's coherent error may have the same size.
    """
    baseline, candidate = pair.baseline.summary, pair.candidate.summary
    moved, apart = abs(float(candidate["sum"] - baseline["sum"])), float(distance(baseline, candidate))
    if int(finite_count(baseline)) < _ROUNDED_ELEMENTS or moved > 4.0 * apart:
        return False
    return best_fit(pair.baseline, pair.candidate)[1] >= 0.8 * size_of(pair)


def rounded_to(pair: Pair) -> str:
    """The shorter dtype to which rounding would make a difference as this; empty if there is none."""
    dtypes, size = {pair.baseline.dtype, pair.candidate.dtype}, size_of(pair)
    if len(dtypes) > 1 or not dtypes <= {"float32", "float64"} or not differs_at_random(pair):
        return ""
    near = (
        dtype for dtype in ("bfloat16", "float16") if 0.15 * UNIT_ROUNDOFF[dtype] < size < 1.2 * UNIT_ROUNDOFF[dtype]
    )
    return next(near, "")


CLEAR = 0.05
"""A part counts as different if its difference is at least this share of the largest one."""


def differing_ranks(pair: Pair, floor: float) -> tuple[int, ...]:
    """Ranks of the candidate whose parts differ from the baseline, if the parts of other ranks do not.

    Args:
        pair: A site at which the runs differ.
        floor: Relative difference up to which a part counts as equal.

    Returns:
        The numbers of these ranks; empty if all ranks differ, or if the recordings do not show it.
    """
    held = {part.rank for part in pair.candidate.parts}
    if len(held) < 2 or pair.baseline.unobserved or pair.candidate.unobserved:
        return ()
    if groups := pair.candidate.apart:  # groups of equal copies, the largest first
        largest, *others = groups
        return () if len(others[0]) == len(largest) else tuple(sorted(rank for group in others for rank in group))
    found = _by_parts(pair, floor)
    if found is None:
        found = _by_codes(pair)
    if found is None:
        found = _by_rows(pair)
    return tuple(sorted(found)) if found and found < held else ()


def differences_by_rank(pair: Pair) -> dict[int, float]:
    """By rank: the largest difference of its parts (inf without a size); empty if runs hold different parts."""
    if not (are_known(pair.baseline.parts) and are_known(pair.candidate.parts)):
        return {}
    sides = [_by_place(entry.parts) for entry in (pair.baseline, pair.candidate)]
    if sides[0].keys() != sides[1].keys() or len(sides[0]) < 2:
        return {}
    apart: dict[int, float] = {}
    for place, candidate in sides[1].items():
        one = Pair(baseline=_part(pair.baseline, sides[0][place]), candidate=_part(pair.candidate, candidate))
        apart[candidate.rank] = max(apart.get(candidate.rank, 0.0), size_of(one))
    return apart


def _by_parts(pair: Pair, floor: float) -> set[int] | None:
    """Ranks that differ, part by part; None if the runs do not hold the same parts."""
    apart = differences_by_rank(pair)
    if not apart:
        return None
    limit = max(floor, CLEAR * max(apart.values())) if np.isfinite(max(apart.values())) else floor
    return {rank for rank, size in apart.items() if size > limit}


def _by_codes(pair: Pair) -> set[int] | None:
    """The one rank that differs, if one of the runs is compact; None if several may."""
    sides = (pair.baseline, pair.candidate)
    bits = next((len(one.abridged.codes) for one in sides if one.abridged and one.abridged.codes is not None), 0)
    if not bits or not hold_same_parts(pair.baseline.parts, pair.candidate.parts):
        return None
    broken = _nonfinite_ranks(pair)
    if broken is not None:
        return broken
    codes = [_codes(one, bits) for one in sides]
    if codes[0] is None or codes[1] is None or pair.baseline.shape != pair.candidate.shape:
        return None
    change = pair.candidate.summary["sketch"] - pair.baseline.summary["sketch"]
    rank = differing_rank(np.asarray(change), codes[1] - codes[0], clear=CLEAR)
    return None if rank is None else {rank}


def _codes(entry: MergedSite, bits: int) -> Codes | None:
    if entry.abridged is not None:
        return entry.abridged.codes
    return codes_of(entry.parts, bits) if are_known(entry.parts) else None


def _nonfinite_ranks(pair: Pair) -> set[int] | None:
    """The ranks that hold NaN and infinities, if only the candidate has any, and all of these parts were kept."""
    count = int(nonfinite_count(pair.candidate.summary))
    if not count or int(nonfinite_count(pair.baseline.summary)):
        return None
    known = [(one.rank, int(nonfinite_count(one.summary))) for one in pair.candidate.parts if one.summary is not None]
    return {rank for rank, own in known if own} if sum(own for _, own in known) == count else None


def _by_place(parts: Sequence[RankPart]) -> dict[tuple[Any, ...], RankPart]:
    """Parts by micro-step, shard, and number among the copies of that shard."""
    found: dict[tuple[Any, ...], RankPart] = {}
    copies: dict[tuple[Any, ...], int] = {}
    for part in parts:
        place = (part.micro_step, part.shard)
        number = copies[place] = copies.get(place, -1) + 1
        found[(*place, number)] = part
    return found


def _part(entry: MergedSite, part: RankPart) -> MergedSite:
    return replace(entry, summary=part.summary, shape=part.shard.shape, exact=entry.factor == 1.0)


def _by_rows(pair: Pair) -> set[int] | None:
    """The one rank whose rows hold the whole difference; None if several may, or ranks are not cut by rows."""
    candidate = pair.candidate
    if candidate.batched or candidate.summed or not candidate.shape:
        return None
    axis = "row" if len(candidate.shape) > 1 else "column"
    expected, actual = (np.sqrt(entry.summary[f"{axis}_squares"]) for entry in (pair.baseline, candidate))
    change = np.abs(actual - expected)
    if not np.isfinite(change).all() or not change.any():
        return None
    differing = set(np.flatnonzero(change > CLEAR * change.max()).tolist())
    owners = {part.rank for part in candidate.parts if differing <= _buckets(part.shard)}
    return owners if len(owners) == 1 else None


def _buckets(shard: Shard) -> set[int]:
    """Buckets of the row profile (of a vector, of the column profile) in which a part has elements."""
    grid = shard.grid
    if not shard.size:
        return set()
    length = shard.shape[0]
    if len(shard.offset) < len(shard.global_shape):  # a flat range
        first, last = shard.offset[0] // grid.columns, (shard.offset[0] + length - 1) // grid.columns
    else:
        first, last = shard.offset[0], shard.offset[0] + length - 1
    if len(shard.global_shape) == 1:
        return {column // grid.column_block for column in range(first, last + 1)}
    return {row // grid.row_block % BUCKETS for row in range(first, last + 1)}
