"""Gradients that ranks hold as one common multiple, because clipping by a norm hands on what a few others hold."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from traindiff.analyse.merge.distance import Pair, best_fit
from traindiff.analyse.merge.indexed import once, sites
from traindiff.analyse.merge.recorded_calls import clips
from traindiff.analyse.merge.site import MergedSite, RankPart, SiteKey, StepTable

_FITS = 0.01
"""Part of a copy that a multiple of another one may leave."""

_SAME = 1e-4
"""Relative difference of two multiples that are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonMultiples:
    """Gradients of a step that one rank holds as the same multiple of what another one holds.

    Attributes:
        sites: These gradients.
        aside: A sentence about them, for the gradients that differ otherwise.
    """

    sites: Set[SiteKey]
    aside: str


@once
def common_multiples(table: StepTable) -> CommonMultiples | None:
    """The gradients that differ on ranks by a common factor, beside some that differ otherwise; None if there are none.

    The norm of all gradients is another one on a rank that holds another copy of one of them. Clipping to a norm then
    makes all others differ, too.
    """
    apart = {
        key: entry
        for key, entry in sites(table, "grad", stage="")
        if key.slot == "grad" and entry.apart and not entry.unobserved
    }
    if len(apart) < 3 or not any(one.norm is not None for one in clips(table)):
        return None
    found = {key: differing_copies(entry) for key, entry in apart.items()}
    fits = {key: _fit(apart[key], *copies) for key, copies in found.items()}
    factors = sorted(factor for factor, left_over in fits.values() if left_over <= _FITS)
    if not factors:
        return None
    usual = factors[len(factors) // 2]
    same = {
        key
        for key, (factor, left_over) in fits.items()
        if left_over <= _FITS and abs(factor / usual - 1.0) <= max(_SAME, left_over)
    }
    ranks = {(found[key][0].rank, found[key][1].rank) for key in same}
    if len(ranks) != 1 or not len(apart) / 2 < len(same) < len(apart):
        return None
    most, odd = next(iter(ranks))
    others = f"All other gradients on rank {odd} are {usual:.4g} x those on rank {most}"
    aside = f" ({others}, as clipping to a norm makes them.)"
    return CommonMultiples(sites=same, aside=aside)


def differing_copies(entry: MergedSite) -> tuple[RankPart, RankPart]:
    """The copy that most ranks hold, and one that differs from it."""
    most, other = entry.apart[0][0], entry.apart[1][0]
    of_rank = {(part.micro_step, part.shard): part for part in entry.parts if part.rank == most}
    for part in entry.parts:
        same = of_rank.get((part.micro_step, part.shard))
        if part.rank != other or same is None or same.summary is None or part.summary is None:
            continue  # copies that agree are not kept in a compact recording
        if same.summary["fingerprint"] != part.summary["fingerprint"]:
            return same, part
    return next(part for part in entry.parts if part.rank == most), next(p for p in entry.parts if p.rank == other)


def of_part(entry: MergedSite, part: RankPart) -> MergedSite:
    """One part of a site as a site."""
    return MergedSite(key=entry.key, order=entry.order, dtype=entry.dtype, shape=part.shard.shape, summary=part.summary)


def _fit(entry: MergedSite, usual: RankPart, odd: RankPart) -> tuple[float, float]:
    pair = Pair(baseline=of_part(entry, usual), candidate=of_part(entry, odd))
    factor, left_over = best_fit(pair.baseline, pair.candidate)
    return (factor, left_over) if factor > 0.0 else (0.0, 1.0)
