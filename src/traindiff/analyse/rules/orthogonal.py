"""Updates of Muon whose parts ranks hold: what must be true of their sums if the whole update is orthogonal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.indexed import sites
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable, finding_at
from traindiff.core.orthogonality import SUMS, TERMS, Vector, singular_values
from traindiff.core.summary import number
from traindiff.core.witness import elements

MARGIN = 0.1
"""Relative rounding error of a norm: that of the iterations, which are computed in bfloat16; measured: 0.02."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """What Newton-Schulz iterations make of singular values: f(s) for s between 0 and 1.

    Attributes:
        before: Values of s, ascending.
        after: f(s) of each.
    """

    before: Vector
    after: Vector

    @property
    def largest(self) -> float:
        """The largest singular value of an update."""
        return float(np.abs(self.after).max())

    def least(self, power: int, spread: float) -> float:
        """A lower bound of the sum of f(s)^power s^(2 - power) over singular values s, whose squares add up to 1.

        `h(t) = 2t - t^2` is at most 1, so f(s)^p s^(2-p) >= q h(s^2 / spread), with the least quotient q. The sum of
        h over all s is at least 1 / spread, as the s^4 add up to `spread` at most.

        Args:
            power: 2 for the squared norm of the update; 1 for its inner product with the normalized momentum.
            spread: An upper bound of the sum of s^4: 1 for one singular value, 1 / n for n equal ones.
        """
        t = self.before**2 / spread
        inside = (t > 0.0) & (t < 2.0)
        value = self.after[inside] ** power * self.before[inside] ** (2 - power)
        return float((value / (2.0 * t[inside] - t[inside] ** 2)).min()) / spread


def divided_updates(table: StepTable, groups: Mapping[str, frozenset[str]], *, step: int) -> Iterator[Finding]:
    """Findings about the updates of a step that only sums are known of.

    Args:
        table: The step.
        groups: Paths of the groups that hold a parameter, by its path.
        step: Its number.
    """
    for key, entry in sites(table, "update", stage=TERMS):
        if entry.unobserved or "(" in key.slot:
            continue  # a subclass may do something else on purpose, and a compiled step is read late
        parameter = table.get(SiteKey("param", "", key.path, "value"))
        sums, band = _sums(entry), _band(table, groups.get(key.path, frozenset()))
        if parameter is None or len(parameter.shape) != 2 or sums is None or band is None:
            continue
        if message := _message(key, sums, band, parameter.shape):
            yield finding_at(entry, step=step, kind="update-rule", message=message, evidence=dict(sums))


def _sums(entry: MergedSite) -> dict[str, float] | None:
    """The sums by name, of each part once; None if one is not finite."""
    vectors = {part.term: elements(part.summary) for part in entry.parts}
    total = np.sum(list(vectors.values()), axis=0)
    return dict(zip(SUMS, map(float, total), strict=True)) if vectors and np.isfinite(total).all() else None


def _band(table: StepTable, groups: frozenset[str]) -> Band | None:
    """What the iterations of a group make of singular values; None if its settings are not known."""
    if len(groups) != 1:
        return None
    (group,) = groups
    names = ("ns_coefficients[0]", "ns_coefficients[1]", "ns_coefficients[2]", "ns_steps")
    entries = [table.get(SiteKey("optimizer", "", group, name)) for name in names]
    values = [number(one.summary) for one in entries if one is not None and not one.unobserved]
    if len(values) < len(names):
        return None
    before, after = singular_values((values[0], values[1], values[2]), int(values[3]))
    return Band(before=before, after=after)


def _message(key: SiteKey, sums: Mapping[str, float], band: Band, shape: Sequence[int]) -> str:
    """The sentence about an update that cannot be what the iterations give; empty if it may be."""
    rows, columns = shape
    if sums["rows"] not in (rows, -columns) or not sums["momentum"]:
        return ""  # a rank was not recorded, or there is nothing to orthogonalize
    probed = columns if sums["rows"] > 0.0 else rows
    norm, rounding, size = (math.sqrt(sums[name]) for name in ("update", "rounding", "momentum"))
    spread = min(1.0, (sums["gram"] / sums["momentum"]) ** 2)
    most = band.largest * (1.0 + MARGIN)
    most_norm = most * math.sqrt(min(rows, columns))
    least_norm = math.sqrt(band.least(2, spread)) * (1.0 - MARGIN)
    along, least_along = sums["inner"] / size, band.least(1, spread) * (1.0 - MARGIN)
    largest = math.sqrt(max(sums["probe[0]"], sums["probe[1]"]) / probed)
    at_most, at_least = "the iterations give {:.4g} at most", "the iterations give {:.4g} or more"
    what = ""
    if norm > most_norm + rounding:
        what = f"its norm is {norm:.4g} x the learning rate, and {at_most.format(most_norm)}"
    elif largest > most + rounding / math.sqrt(probed):
        what = f"one of its singular values is {largest:.4g} or more, and {at_most.format(most)}"
    elif norm + rounding < least_norm:
        what = f"its norm is {norm:.4g} x the learning rate, and {at_least.format(least_norm)}"
    elif along + rounding < least_along:
        what = f"along its momentum it is {along:.4g} x the learning rate, and {at_least.format(least_along)}"
    begin = f"{key.slot} moves {key.path} by something else than its momentum, orthogonalized."
    return what and f"{begin} Summed over ranks, {what}."
