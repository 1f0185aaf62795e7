"""Gradients against the sum of what the micro-batches contributed to them (observe `grad.micro`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from traindiff.analyse.findings import micro_steps_text
from traindiff.analyse.merge.recorded_calls import contributions
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable
from traindiff.analyse.rules.optimizers import may_be_left_out
from traindiff.analyse.rules.rule import Contents, Found, Limit, Repeated, RepeatedRule
from traindiff.core.observation import WITNESS
from traindiff.core.summary import UNIT_ROUNDOFF
from traindiff.core.witness import EXPECTED

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
            key[:2] == ("grad", "micro") and any(part.micro_step for part in entry.parts)
            for key, entry in contents.table.items()
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
