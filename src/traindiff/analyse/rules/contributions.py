"""Gradients against the sum of what the micro-batches contributed to them (observe `grad.micro`)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from traindiff.analyse.findings import Finding, micro_steps_text, ranks_text
from traindiff.analyse.merge.indexed import sites
from traindiff.analyse.merge.recorded_calls import clips, contributions
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable, finding_at
from traindiff.analyse.rules.optimizers import may_be_left_out
from traindiff.analyse.rules.rule import Contents, Found, Limit, Repeated, RepeatedRule, Rule
from traindiff.core.observation import CARRIED, FLIPPED, WITNESS
from traindiff.core.summary import UNIT_ROUNDOFF, norm_of
from traindiff.core.witness import EDITED, EXPECTED, GIVEN, elements

FEW = 16
"""Elements below which a fit of several terms says little."""

_MOST_TERMS = 16
"""Micro-steps of a step above which a fit of the sketch's 64 numbers says little."""

_FITS = 1e-3
"""Part of a gradient that a fit may leave: sums of float32 leave 1e-7, and the short dtypes are allowed more."""

_DISTINCT = 0.05
"""Part of a gradient that the sum of its contributions leaves at least, if that is not what the gradient is."""

_SAME = 0.02
"""Relative distance of two factors that are called equal."""

_NOISE = 12.0
"""Multiple of the usual difference of a number of a sketch that one wrong element makes at least; right ones make 5."""

_FEW_ROUNDINGS = 4.0
"""Multiple of what one addition could lose of the largest element that is no finding; right sums stay below 1."""

_UNUSUAL = 3.0
"""Multiple of what rounding of all elements explains, above which sums were rounded in another way than is known."""

_SIGMA = 0.6745
"""Median of the magnitude of a normally distributed number, in standard deviations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sum:
    """A gradient, and its contributions: sketches, by micro-step, summed over ranks."""

    entry: MergedSite
    terms: Mapping[int, NDArray[np.float64]]

    @property
    def sketch(self) -> NDArray[np.float64]:
        """Of the gradient."""
        return np.asarray(self.entry.summary["sketch"])

    @property
    def whole(self) -> NDArray[np.float64]:
        """The sum of the contributions."""
        return np.asarray(sum(self.terms.values()), dtype=np.float64)

    @property
    def allowed(self) -> float:
        """Part of the gradient that a right fit may leave."""
        rounds = 4.0 * UNIT_ROUNDOFF.get(self.entry.dtype, 0.0) * len(self.terms)
        return min(max(_FITS, rounds), 0.4 * _DISTINCT)


def _sums(table: StepTable) -> Iterator[_Sum]:
    """The gradients of a step whose contributions were recorded; none where a loss scaler may leave the step out."""
    if may_be_left_out(table):
        return
    for path, found in contributions(table).items():
        entry = table.get(SiteKey("grad", "", path, "grad"))
        if entry is None or entry.unobserved or int(entry.summary["count"]) < FEW:
            continue
        if not float(entry.summary["sum_of_squares"]) or table.get(SiteKey("grad", "micro", path, "grad", 1)):
            continue
        terms: dict[int, Any] = {}
        for (micro_step, _), one in found.items():
            terms[micro_step] = terms.get(micro_step, 0.0) + one["sketch"]
        yield _Sum(entry=entry, terms=terms)


def _fit(columns: NDArray[np.float64], target: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Factors of the columns that fit a target best, and the part of the target that they leave."""
    factors, *_ = np.linalg.lstsq(columns, target, rcond=None)
    size = float(np.linalg.norm(target))
    left = float(np.linalg.norm(columns @ factors - target)) / size if size else 1.0
    return np.asarray(factors, dtype=np.float64), left


def _is_the_sum(one: _Sum) -> bool:
    """True if a gradient is a multiple of the sum of its contributions, as clipping makes it."""
    factors, left = _fit(one.whole[:, None], one.sketch)
    return left <= min(_DISTINCT, 10.0 * one.allowed) and factors[0] > 0.0


class ContributionsCount(RepeatedRule):
    """Gradients lack what some micro-steps contributed, in all parameters.

    If `zero_grad` is called inside the loop over micro-steps, only the last one counts. The rule fits each gradient by
    the contributions of the micro-steps: some must have a factor of 0, and all others the same one. A training may
    compute gradients that it throws away (to look at their norms), so the rule only warns. Trainings with several
    optimizers are not judged, because backward passes of one also reach parameters of others. It needs
    `record(observe=[..., "grad.micro"])`. What the witness names, too (`wrong-gradient`), is not named again.
    """

    name = "lost-contribution"
    finds = "Gradients lack what some micro-steps contributed."
    needs = 'several micro-steps, and what each contributes, which record(observe=[..., "grad.micro"]) records'
    warns = True
    limits: ClassVar[Mapping[str, Limit]] = {
        "least_steps": Limit(default=3, message="steps in a row in which it must be so"),
    }

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return any(
            any(part.micro_step for part in entry.parts) for _, entry in sites(contents.table, "grad", stage="micro")
        )

    def _wrong(self, table: StepTable) -> Found | None:
        sums = [one for one in _sums(table) if 1 < len(one.terms) <= _MOST_TERMS]
        if not sums or len(self.facts.optimizers) > 1:
            return None
        lost = [_lost(one) for one in sums]
        if not lost[0] or any(one != lost[0] for one in lost) or _is_witnessed(table, sums[0].entry.key, lost[0]):
            return {}
        return {lost[0]: (sums[0].entry, {"lost": list(lost[0]), "micro_steps": len(sums[0].terms)})}

    def _message(self, row: Repeated) -> str:
        lost, count = row.numbers["lost"], row.numbers["micro_steps"]
        return (
            f"The gradients lack what {micro_steps_text(lost)} of {count} contributed, in {row.num_steps} steps in a "
            "row. Is zero_grad() called inside the loop over micro-steps?"
        )


def _is_witnessed(table: StepTable, gradient: SiteKey, lost: tuple[int, ...]) -> bool:
    """True if the witness expects what is lost, too: then `wrong-gradient` says so, of each gradient and step."""
    expected = table.get(gradient._replace(stage=WITNESS, slot=EXPECTED))
    return expected is not None and not expected.unobserved and set(lost) <= {
        part.micro_step for part in expected.parts
    }  # fmt: skip


def _lost(one: _Sum) -> tuple[int, ...]:
    """Micro-steps whose contribution a gradient lacks; empty if there are none, or if the fit says something else."""
    factors, left = _fit(np.stack(list(one.terms.values()), axis=1), one.sketch)
    most = float(factors.max(initial=0.0))
    if left > one.allowed or most <= 0.0 or _is_the_sum(one):
        return ()
    relative = factors / most
    zero, same = np.abs(relative) <= _SAME, np.abs(relative - 1.0) <= _SAME
    if not zero.any() or not (zero | same).all():
        return ()
    return tuple(step for step, is_lost in zip(one.terms, zero, strict=True) if is_lost)


class ElementsAddUp(Rule):
    """One element of a gradient is not the sum of what ranks and micro-steps contributed to it.

    The sketch of a sum is the sum of the sketches but for rounding. A sketch has 64 numbers, and each element counts in
    one of them. So an element that changed in a reduction, or in memory, stands out in one number, even by less than
    the rounding of the whole gradient. It must be twelve times the usual difference of the 64 numbers, and four times
    what rounding the largest element could lose in each addition. Gradients that the training wrote to after the last
    backward pass, in this step or before, or clipped, are not judged, nor are steps in which sums are rounded by more
    than the gradients' dtype.

    It needs `record(observe=[..., "grad.micro", "witness"])`: the witness tells which gradients were written to.
    """

    name = "wrong-sum"
    finds = "One element of a gradient is not the sum of what ranks and micro-steps contributed to it."
    needs = 'witnessed gradients and their terms, which record(observe=[..., "grad.micro", "witness"]) records'
    tells_runs_apart = True

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return {"micro", WITNESS} <= contents.stages

    def begin(self) -> None:
        """No gradient was written to so far."""
        self._edited: set[str] = set()  # gradients that the training wrote to, in some step so far

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """Findings of a step: one for each gradient."""
        self._edited |= {
            key.path
            for key, entry in sites(table, "grad", stage=WITNESS)
            if key.slot == GIVEN and not entry.unobserved
            and any(elements(part.summary)[EDITED] for part in entry.parts)
        }  # fmt: skip
        if self.facts.has_hook or may_be_left_out(table):
            return
        found = [one for one in contributions(table).items() if one[0] not in self._edited]
        sums = [one for path, terms in found for one in _residuals(table, path, [*terms.values()])]
        if any(one.noise > _UNUSUAL * one.explained for one in sums):
            return
        for one in sums:
            largest, second = np.sort(np.abs(one.left))[:-3:-1]
            allowed = max(_NOISE * one.noise, _FEW_ROUNDINGS * one.additions * one.lost)
            if largest > allowed > second:
                where = f" on {ranks_text(one.ranks, capital=False)}" if one.ranks else ""
                message = (
                    f"One element of the gradient{where} is not the sum of what ranks and micro-steps contributed: it "
                    f"is off by {largest:.2g}, and rounding explains {allowed / _FEW_ROUNDINGS:.1g}. Did it change in "
                    "a reduction, or in memory? Is the hardware sound?"
                )
                yield finding_at(
                    one.entry, step=step, kind=self.name, message=message, difference=float(largest),
                    floor=float(allowed), rank=one.ranks[0] if len(one.ranks) == 1 else None,
                    evidence={"off_by": float(largest)},
                )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Residual:
    """What the contributions leave of a gradient.

    Attributes:
        entry: The gradient.
        ranks: Those that hold this copy of it, if ranks hold different ones.
        left: The numbers of its sketch minus those of the contributions.
        noise: Their standard deviation, of most of them.
        explained: The same as rounding of all elements explains it, if they are alike in size.
        lost: What rounding the largest element can lose in one addition.
        additions: The number of additions of an element.
    """

    entry: MergedSite
    ranks: tuple[int, ...]
    left: NDArray[np.float64]
    noise: float
    explained: float
    lost: float
    additions: int


def _residuals(table: StepTable, path: str, terms: Sequence[Any]) -> Iterator[_Residual]:
    """What the contributions to a gradient leave of each copy; nothing if it was changed, or something is not known."""
    entry = table.get(SiteKey("grad", "reduced", path, "grad"))
    if entry is None and not clips(table):
        entry = table.get(SiteKey("grad", "", path, "grad"))
    given = table.get(SiteKey("grad", WITNESS, path, GIVEN))
    if entry is None or entry.unobserved or given is None or given.unobserved:
        return
    others = (("micro", 1), (CARRIED, 0), (FLIPPED, 0))
    if any(SiteKey("grad", stage, path, "grad", call) in table for stage, call in others):
        return
    u = UNIT_ROUNDOFF.get(entry.dtype)
    if u is None:
        return
    whole = np.sum([one["sketch"] for one in terms], axis=0)
    additions = max(1, len(terms) - 1)
    for ranks, summary in _copies(entry):
        left = np.asarray(summary["sketch"] - whole)
        sizes = [norm_of(one) for one in (summary, *terms)]
        if not np.isfinite(left).all() or not np.isfinite(sizes).all():
            continue
        largest = max(_largest(one, size) for one, size in zip((summary, *terms), sizes, strict=True))
        yield _Residual(
            entry=entry, ranks=ranks, left=left, noise=float(np.median(np.abs(left))) / _SIGMA,
            explained=u * max(sizes) * math.sqrt(additions / len(left)), lost=u * largest, additions=additions,
        )  # fmt: skip


def _copies(entry: MergedSite) -> Iterator[tuple[tuple[int, ...], Any]]:
    """A gradient, or each of several copies with the ranks that hold it; none of copies that are in parts."""
    if not entry.apart:
        yield (), entry.summary
        return
    by_rank = {part.rank: part for part in entry.parts}
    if len({part.shard for part in entry.parts}) == 1 and all(ranks[0] in by_rank for ranks in entry.apart):
        yield from ((tuple(ranks), by_rank[ranks[0]].summary) for ranks in entry.apart)


def _largest(summary: Any, size: float) -> float:
    """Magnitude of the largest element, or the norm where that is not known."""
    found = max(abs(float(summary["minimum"])), abs(float(summary["maximum"])))
    return found if math.isfinite(found) else size
