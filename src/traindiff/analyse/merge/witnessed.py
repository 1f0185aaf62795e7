"""Both sides of the identity by which gradients are checked, from one step's table; see `traindiff.core.witness`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from traindiff.analyse.merge.indexed import sites
from traindiff.analyse.merge.recorded_calls import clips
from traindiff.analyse.merge.site import MergedSite, RankPart, SiteKey, StepTable
from traindiff.core.observation import WITNESS
from traindiff.core.summary import UNIT_ROUNDOFF, norm_of
from traindiff.core.witness import (
    CONTRIBUTED,
    CONVERTED,
    EDITED,
    EXPECTED,
    GIVEN,
    GROWTH,
    LAYERS,
    PROBES,
    ROUNDED,
    TERMS,
    elements,
)

Vector = NDArray[np.float64]
"""One number for each probe."""

NO_DTYPES: Mapping[str, str] = MappingProxyType({})

_LARGEST_ROUNDOFF = 2.0**-3

AGREES = 4.0
"""Multiple of what rounding explains up to which two contributions agree; right ones stay below 2."""


class Term(NamedTuple):
    """What one rank's micro-step contributes to a gradient.

    Attributes:
        micro_step: Number of the micro-step.
        rank: The rank.
        sums: Its probes.
        errors: Root mean square of the rounding error of its probes.
        roundoff: Unit roundoff of its result.
        growth: Relative rounding error of its sum over rows.
    """

    micro_step: int
    rank: int
    sums: Vector
    errors: float
    roundoff: float
    growth: float


class InCompiled(NamedTuple):
    """What compiled code contributed, against what the calls of layers in it should contribute.

    Attributes:
        error: Root mean square of the difference.
        allowed: Its root mean square that rounding explains.
        micro_step: The micro-step.
        rank: The rank, if there are several.
    """

    error: float
    allowed: float
    micro_step: int
    rank: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Witnessed:
    """The gradient of one parameter in one step, with what is expected of it.

    Attributes:
        entry: The gradient.
        terms: What each micro-step and rank contributes; copies once.
        given: The gradient's probes, by the ranks that hold equal copies of all its shards.
        expected: The sum of `terms`.
        size: Frobenius norm of the gradient, before clipping, or the root mean square of the probes if that is larger.
        allowed: Root mean square of the difference that rounding explains.
        edited: Whether the training wrote to the gradient between the backward pass and the optimizer.
        contributed: Whether it is expected to be the sum of what backward passes contributed, and nothing is known of
            what these should be. What compiled code contributed is known if `worst_in_compiled` agrees.
        worst_in_compiled: Of what compiled code contributed, the micro-step and rank where it is furthest from what the
            layers give; None if not all of it can be compared.
    """

    entry: MergedSite
    terms: Sequence[Term]
    given: Sequence[tuple[tuple[int, ...], Vector]]
    expected: Vector
    size: float
    allowed: float
    edited: bool
    contributed: bool
    worst_in_compiled: InCompiled | None

    @property
    def right(self) -> str:
        """What the gradient should be, in words."""
        return "what backward passes contributed" if self.contributed else (
            "what the inputs and outputs of its layer give"
        )  # fmt: skip


def rms(values: Vector) -> float:
    """Root mean square."""
    return float(np.sqrt(np.mean(np.square(values))))


def witnessed(table: StepTable, reduced_in: Mapping[str, str] = NO_DTYPES) -> list[Witnessed]:
    """The gradients of a step of which both sides are known and finite, in the order of the table.

    Args:
        table: The step.
        reduced_in: The shorter dtype in which an engine reduces a gradient, by the path of its parameter.
    """
    factor = math.prod(one.coefficient for one in clips(table) if one.norm is not None)
    found = []
    for key, entry in sites(table, "grad", stage=WITNESS):
        if key.slot != EXPECTED or entry.unobserved:
            continue
        given = table.get(key._replace(slot=GIVEN))
        gradient = table.get(SiteKey("grad", "", key.path, "grad"))
        if given is None or given.unobserved or gradient is None or gradient.unobserved:
            continue
        before = table.get(SiteKey("grad", "reduced", key.path, "grad"))
        size = _norm(before) or _norm(gradient) / (factor or 1.0)
        layers = table.get(key._replace(slot=LAYERS))
        one = _witnessed(entry, given, layers, gradient, size, reduced_in.get(key.path, gradient.dtype))
        if one is not None:
            found.append(one)
    return found


def _norm(entry: MergedSite | None) -> float:
    return 0.0 if entry is None or entry.unobserved else norm_of(entry.summary)


def _witnessed(
    expected: MergedSite, given: MergedSite, layers: MergedSite | None, gradient: MergedSite, size: float,
    reduced_in: str,
) -> Witnessed | None:  # fmt: skip
    terms = _terms(expected.parts)
    copies = _copies(given.parts)
    total = np.sum([one.sums for one in terms], axis=0)
    vectors = [vector[:PROBES] for _, vector in copies]
    if not terms or not copies or not np.isfinite([total, *vectors]).all() or not np.isfinite(size):
        return None
    size = max(size, rms(total))
    roundoff = UNIT_ROUNDOFF.get(gradient.dtype, 0.0)
    worst = None if layers is None or layers.unobserved else _worst(terms, _terms(layers.parts), size, roundoff)
    agrees = worst is not None and worst.error <= AGREES * worst.allowed
    return Witnessed(
        entry=gradient,
        terms=terms,
        given=[(ranks, vector[:PROBES]) for ranks, vector in copies],
        expected=total,
        size=size,
        allowed=_allowed(terms, size, roundoff, UNIT_ROUNDOFF.get(reduced_in, 0.0)),
        edited=any(vector[EDITED] for _, vector in copies),
        contributed=any(vector[CONTRIBUTED] for _, vector in copies) and not agrees,
        worst_in_compiled=worst,
    )


def _worst(terms: Sequence[Term], layers: Sequence[Term], size: float, roundoff: float) -> InCompiled | None:
    """Where what was contributed is furthest from what layers give, as multiples of what rounding explains."""
    pairs = [*zip(terms, layers, strict=False)]
    if len(terms) != len(layers) or any((one.micro_step, one.rank) != (two.micro_step, two.rank) for one, two in pairs):
        return None
    several = len({one.rank for one in terms}) > 1
    found = [
        InCompiled(
            error=rms(one.sums - two.sums),
            allowed=math.hypot(one.errors, _allowed([two], max(size, rms(two.sums)), roundoff, 0.0)),
            micro_step=one.micro_step,
            rank=one.rank if several else None,
        )
        for one, two in pairs
        if np.isfinite(two.sums).all()
    ]
    if len(found) < len(pairs):
        return None
    return max(found, key=lambda one: one.error / (one.allowed or math.ulp(0.0)))


def _terms(parts: Iterable[RankPart]) -> list[Term]:
    """The terms of a sum: ranks that work on the same samples have copies of one."""
    found: dict[tuple[int, int], Term] = {}
    for part in parts:
        if (part.micro_step, part.term) in found:
            continue
        vector = elements(part.summary)
        sums = vector[:PROBES]
        size = rms(sums) or math.inf
        found[part.micro_step, part.term] = Term(
            micro_step=part.micro_step,
            rank=part.rank,
            sums=sums,
            errors=float(np.sqrt(np.square(vector[[GROWTH, CONVERTED, ROUNDED, TERMS]]).sum())),
            roundoff=min(float(vector[ROUNDED]) / size, _LARGEST_ROUNDOFF),
            growth=min(float(vector[GROWTH]) / size, 1.0),
        )
    return [found[place] for place in sorted(found)]


def _copies(parts: Iterable[RankPart]) -> list[tuple[tuple[int, ...], Vector]]:
    """The gradient as ranks hold it: ranks whose copies are equal, and the sum of the vectors of all shards."""
    held: dict[int, dict[int, Vector]] = {}  # by term, by rank
    for part in parts:
        held.setdefault(part.term, {})[part.rank] = elements(part.summary)
    ranks = sorted({rank for by_rank in held.values() for rank in by_rank})
    found: dict[bytes, tuple[list[int], Vector]] = {}
    for rank in ranks:
        whole = np.sum([by_rank.get(rank, next(iter(by_rank.values()))) for by_rank in held.values()], axis=0)
        found.setdefault(whole.tobytes(), ([], whole))[0].append(rank)
    return [(tuple(same), whole) for same, whole in found.values()]


def _allowed(terms: Sequence[Term], size: float, roundoff: float, reduction: float) -> float:
    """Root mean square of the difference that rounding explains.

    Beside the errors of each term: the sums over ranks are rounded as terms are, or in the dtype of the reduction; the
    sums over micro-steps as the gradient is, and so is the result. Probes may be small by chance where the gradient is
    not, so its norm counts.
    """
    relative = max(roundoff, reduction, *(one.roundoff for one in terms)), max(one.growth for one in terms)
    squares = sum(one.errors**2 for one in terms) + sum((one * size) ** 2 for one in relative)
    if reduction > roundoff:  # what each rank has is converted first
        squares += sum((reduction * rms(one.sums)) ** 2 for one in terms)
    total: Vector = np.zeros(PROBES)
    for micro_step in dict.fromkeys(one.micro_step for one in terms):
        of_ranks: Vector = np.zeros(PROBES)
        same = [one for one in terms if one.micro_step == micro_step]
        for one in same:
            of_ranks = of_ranks + one.sums
            squares += (max(one.roundoff, reduction) * rms(of_ranks)) ** 2 if len(same) > 1 else 0.0
        total = total + of_ranks
        squares += (roundoff * rms(total)) ** 2
    return math.sqrt(squares)
