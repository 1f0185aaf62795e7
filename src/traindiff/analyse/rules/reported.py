"""True if logged numbers about the gradients agree with the recorded gradients."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.indexed import once, sites
from traindiff.analyse.merge.placed_parts import shards_of
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable, finding_at, ranks_in
from traindiff.analyse.rules.rule import Contents, Rule
from traindiff.core.observation import NO_GRADIENT, REPLACED, TAKEN_OUT
from traindiff.core.summary import UNIT_ROUNDOFF, is_finite, norm_of, number


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """The gradients with which an optimizer was called.

    Attributes:
        squares: Sum of squares by path.
        copied: Those of which several ranks hold copies.
        divided: Those of which several ranks hold a part each.
        ranks: Number of ranks that hold any.
        dimensions: Number of axes by path.
        contributed: Norm right after backward; None if unknown.
        tolerance: Relative error that a norm of them may have.
    """

    squares: Mapping[str, float]
    copied: frozenset[str]
    divided: frozenset[str]
    ranks: int
    dimensions: Mapping[str, int]
    contributed: float | None
    tolerance: float

    @property
    def norm(self) -> float:
        """L2 norm of all of them."""
        return math.sqrt(sum(self.squares.values()))


@once
def gradients_of(table: StepTable) -> Gradients | None:
    """The gradients of a step; None if they are not all known, or not all finite."""
    entries = {key.path: entry for key, entry in sites(table, "grad", stage="")}
    unknown = any(e.unobserved and not _has_none(e.unobserved) for e in entries.values())
    entries = {path: entry for path, entry in entries.items() if not entry.unobserved}
    if unknown or not entries:
        return None
    if not all(is_finite(entry.summary) and entry.exact and not entry.apart for entry in entries.values()):
        return None
    several = {path: entry for path, entry in entries.items() if len(entry.parts) > 1}
    shards = {path: len(shards_of(entry.parts)) for path, entry in several.items()}
    u = max(UNIT_ROUNDOFF.get(entry.dtype, 0.0) for entry in entries.values())
    count = sum(int(entry.summary["count"]) for entry in entries.values())
    micro = [table.get(SiteKey("grad", "micro", path, "grad")) for path in entries]
    known = all(one is not None and one.exact and not one.unobserved for one in micro)
    return Gradients(
        squares={path: float(entry.summary["sum_of_squares"]) for path, entry in entries.items()},
        copied=frozenset(path for path, number in shards.items() if number == 1),
        divided=frozenset(path for path, number in shards.items() if number > 1),
        ranks=len(ranks_in(entries)),
        dimensions={path: len(entry.shape) for path, entry in entries.items()},
        contributed=math.sqrt(sum(norm_of(e.summary) ** 2 for e in micro if e is not None)) if known else None,
        # Short dtypes round each norm; float32 sums may be in any order.
        tolerance=4.0 * u if u > UNIT_ROUNDOFF["float32"] else max(64.0, math.sqrt(count)) * u,
    )


def _has_none(reason: str) -> bool:
    """True if a parameter has no gradient, and not one that its optimizer does not see."""
    return reason.startswith(NO_GRADIENT) and reason not in (REPLACED, TAKEN_OUT)


def set_of(gradients: Gradients, share: float) -> str:
    """A name for the parameters that hold this share of all squares; empty if no set or several do."""
    whole = sum(gradients.squares.values())
    near = 4.0 * gradients.tolerance
    found: dict[frozenset[str], str] = {}
    for words, paths in _sets(gradients):
        part = sum(gradients.squares[path] for path in paths) / whole
        if 10.0 * near < part and abs(part - share) <= near and len(paths) < len(gradients.squares):
            found.setdefault(paths, words)
    return next(iter(found.values())) if len(found) == 1 else ""


def counted_often(gradients: Gradients, excess: float) -> tuple[str, str] | None:
    """The parameters that account for so many additional squares, and how often they are counted."""
    for times in sorted({2, gradients.ranks} - {1}):
        if what := set_of(gradients, excess / (times - 1)):
            return what, "twice" if times == 2 else f"{times} times"
    return None


def _sets(gradients: Gradients) -> Iterable[tuple[str, frozenset[str]]]:
    """Sets of parameters that a training may treat separately, and their names."""
    by_name: dict[str, set[str]] = {}
    for path in gradients.squares:
        parts = path.split(".")
        yield path, frozenset({path})
        for depth in range(1, len(parts)):
            by_name.setdefault(f"{'.'.join(parts[:depth])}.*", set()).add(path)
            by_name.setdefault(f"*.{'.'.join(parts[depth:])}", set()).add(path)
    vectors = frozenset(path for path, axes in gradients.dimensions.items() if axes < 2)
    yield "all parameters with one axis (biases, norms)", vectors
    yield "all parameters with two axes or more", frozenset(gradients.dimensions) - vectors
    yield "all parameters of which ranks hold copies", gradients.copied
    yield "all parameters that are divided over ranks", gradients.divided
    yield from ((f"all of {name}", frozenset(paths)) for name, paths in by_name.items() if len(paths) > 1)


NORMS = re.compile(r"(.*[./_ -])?(grad(ient)?s?[._ -]?norm|total[._ -]?norm|gnorm)", re.IGNORECASE)
"""Names under which trainings log the norm of all gradients."""

COEFFICIENTS = re.compile(r"(.*[./ -])?(grad_)?clip(ping)?_?(coef|coeff|coefficient|factor)", re.IGNORECASE)
"""Names under which trainings log the clipping coefficient."""

SCALES = re.compile(r"(.*[./ -])?(loss_?|grad_?)?scale", re.IGNORECASE)
"""Names under which trainings log the scale of the loss."""

SHARP = 1e-4
"""Largest tolerance at which equal norms mean something: there are hundreds of sets of parameters."""


class ReportedNumbersFit(Rule):
    """Logged numbers about the gradients do not agree with the recorded gradients.

    A reported norm may be computed before or after clipping, may be smoothed, or may have another order. So the rule
    reports it only if it can name the parameters that the norm omits or counts twice. This conclusion follows from two
    equal numbers, which may be a coincidence. So the rule waits until it finds the same a second time in a row.
    """

    name = "reported-numbers"
    finds = "A logged gradient norm, clip coefficient or loss scale does not fit the recorded gradients."
    needs = "logged gradient norms, clip coefficients or loss scales"
    kinds = ("reported-norm", "clip-coefficient", "loss-scale")
    tells_runs_apart = True
    judges_sizes = True

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return any(
            key.slot == "logged" and any(names.fullmatch(key.path) for names in (NORMS, COEFFICIENTS, SCALES))
            for key in contents.table
        )

    def begin(self) -> None:
        """Nothing was seen so far."""
        self._in_a_row: dict[str, int] = {}

    def step(self, table: StepTable, *, step: int) -> list[Finding]:
        """Findings of a step."""
        gradients = gradients_of(table) if self.facts.complete else None
        if gradients is None:
            self._in_a_row = {}
            return []
        suspected = {str(one.evidence["what"]): one for one in self._norms(table, gradients, step=step)}
        self._in_a_row = {what: self._in_a_row.get(what, 0) + 1 for what in suspected}
        found = [one for what, one in suspected.items() if self._in_a_row[what] >= 2]
        return [*found, *_scalings(table, gradients, step=step)]

    def _norms(self, table: StepTable, gradients: Gradients, *, step: int) -> Iterable[Finding]:
        """Reported gradient norms that leave out some parameters, count some twice, or are scaled."""
        tolerance, actual = gradients.tolerance, gradients.norm
        for entry, reported in _logged(table, NORMS):
            if tolerance > SHARP or not actual or not reported > 0.0:
                continue
            missing = 1.0 - (reported / actual) ** 2
            if abs(missing) <= 4.0 * tolerance / self.strictness or (missing < 0.0 and _is_round(actual)):
                continue  # the same, or clipped to a round number
            scale = math.log2(reported / actual)
            if missing > 0.0 and (what := set_of(gradients, missing)):
                message = (
                    f"The reported gradient norm {reported:.6g} leaves out {what}: all gradients that the optimizer "
                    f"saw have the norm {actual:.6g}, and without these {reported:.6g}."
                )
            elif missing < 0.0 and (found := counted_often(gradients, -missing)):
                what, times = found
                message = (
                    f"The reported gradient norm {reported:.6g} counts {what} {times}: the gradients that the "
                    f"optimizer saw have the norm {actual:.6g}."
                )
            elif round(scale) >= 1 and abs(scale - round(scale)) <= 4.0 * tolerance:
                what = f"{2 ** round(scale)} x"
                message = (
                    f"The reported gradient norm {reported:.6g} is {what} that of the gradients that the optimizer "
                    f"saw, {actual:.6g}: taken before the loss scale was divided out?"
                )
            else:
                continue
            apart = abs(reported / actual - 1.0)
            evidence = {"what": what, "reported": reported, "recomputed": actual}
            yield finding_at(
                entry, step=step, kind="reported-norm", message=message, evidence=evidence,
                difference=apart, floor=tolerance,
            )  # fmt: skip


def _scalings(table: StepTable, gradients: Gradients, *, step: int) -> Iterable[Finding]:
    """Clip coefficients and loss scales that the gradients do not show, or show twice.

    The norm before clipping is that of the micro-batches' contributions (`grad.micro`, one per step), or else the
    reported one. That may itself be taken after clipping, so then only clipping twice can be recognized.
    """
    norms = [reported for _, reported in _logged(table, NORMS)]
    before = gradients.contributed or (norms[0] if len(norms) == 1 else 0.0)
    if not before:
        return
    factor = gradients.norm / before
    near = 4.0 * gradients.tolerance + 1e-5
    for entry, coefficient in _logged(table, COEFFICIENTS):
        if not 0.0 < coefficient < 0.99:
            continue
        if gradients.contributed and abs(factor - 1.0) <= near:
            how = "the gradients that the optimizer saw are not clipped"
        elif abs(factor / coefficient**2 - 1.0) <= near:
            how = "the gradients that the optimizer saw are clipped twice"
        else:
            continue
        message = (
            f"A clip coefficient of {coefficient:.4g} is reported, but {how}: their norm is {gradients.norm:.4g}, "
            f"and {before:.4g} before clipping."
        )
        evidence = {"reported": coefficient, "factor": factor}
        apart = abs(factor / coefficient - 1.0)
        yield finding_at(
            entry, step=step, kind="clip-coefficient", message=message, evidence=evidence, difference=apart, floor=near
        )
    for entry, scale in _logged(table, SCALES):
        if scale >= 2.0 and gradients.contributed and abs(factor * scale**2 - 1.0) <= near:
            message = (
                f"The gradients are divided by the loss scale {scale:g} twice: backward gave a norm of {before:.4g}, "
                f"and the optimizer saw {gradients.norm:.4g}."
            )
            evidence = {"reported": scale, "factor": factor}
            yield finding_at(
                entry, step=step, kind="loss-scale", message=message, evidence=evidence, difference=scale, floor=near
            )


def _logged(table: StepTable, names: re.Pattern[str]) -> Iterable[tuple[MergedSite, float]]:
    """Scalars logged once in the step, and equal on all ranks, under one of these names."""
    for key, entry in sites(table, "loss"):
        if key.slot == "logged" and key.call == 0 and names.fullmatch(key.path):
            value = number(entry.summary)
            once = len({part.micro_step for part in entry.parts}) <= 1
            alike = len({number(part.summary) for part in entry.parts}) <= 1  # on all ranks that logged it
            if once and alike and not entry.unobserved and math.isfinite(value):
                yield entry, value


def _is_round(value: float) -> bool:
    """True if a norm is a chosen number, to three digits: a clipping limit."""
    return abs(value / float(f"{value:.3g}") - 1.0) <= 2e-5
