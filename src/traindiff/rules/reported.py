"""Whether what a training reports of its gradients is what was recorded of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

from traindiff.findings import Finding
from traindiff.merging.finding_at import finding_at
from traindiff.merging.step_table import Entry, Key
from traindiff.rules.gradient_sets import Gradients, counted_often, set_of
from traindiff.rules.rule import Rule
from traindiff.summary import number

NORMS = re.compile(r"(.*[./_ -])?(grad(ient)?s?[._ -]?norm|total[._ -]?norm|gnorm)", re.IGNORECASE)
"""Names under which trainings log the norm of all gradients."""

COEFFICIENTS = re.compile(r"(.*[./ -])?(grad_)?clip(ping)?_?(coef|coeff|coefficient|factor)", re.IGNORECASE)
"""Names under which trainings log the factor by which clipping multiplied the gradients."""

SCALES = re.compile(r"(.*[./ -])?(loss_?|grad_?)?scale", re.IGNORECASE)
"""Names under which trainings log the scale of the loss."""

SHARP = 1e-4
"""Largest tolerance at which an equality of norms says something: there are hundreds of sets of parameters."""


class ReportedNumbersFit(Rule):
    """What a training logs of its gradients fits the gradients that were recorded.

    Only what can be derived is judged. A reported norm may be of the gradients before or after clipping, smoothed, or
    of another order: it is found wrong only where what is left out, or counted twice, can be named. That rests on two
    numbers being equal, which they may be by chance: it is told the second time that it is seen in a row.
    """

    name = "reported-numbers"
    finds = "A logged gradient norm, clip coefficient or loss scale does not fit the recorded gradients."
    kinds = ("reported-norm", "clip-coefficient", "loss-scale")

    def begin(self) -> None:
        """See `Rule.begin`."""
        self._in_a_row: dict[str, int] = {}

    def step(self, table: Mapping[Key, Entry], *, step: int) -> list[Finding]:
        """See the class."""
        gradients = Gradients.of(table, self.facts)
        if gradients is None:
            self._in_a_row = {}
            return []
        suspected = {str(one.evidence["what"]): one for one in self._norms(table, gradients, step=step)}
        self._in_a_row = {what: self._in_a_row.get(what, 0) + 1 for what in suspected}
        found = [one for what, one in suspected.items() if self._in_a_row[what] >= 2]
        return [*found, *_scalings(table, gradients, step=step)]

    def _norms(self, table: Mapping[Key, Entry], gradients: Gradients, *, step: int) -> Iterable[Finding]:
        """A reported gradient norm that leaves out some parameters, counts some twice, or is scaled."""
        tolerance = gradients.tolerance / self.strictness
        actual = gradients.norm
        for entry, reported in _logged(table, NORMS):
            if gradients.tolerance > SHARP or not actual or not reported > 0.0:
                continue
            missing = 1.0 - (reported / actual) ** 2
            if abs(missing) <= 4.0 * tolerance or (missing < 0.0 and _is_round(actual)):
                continue  # the same, or clipped to a round number
            scale = math.log2(reported / actual)
            if missing > 0.0 and (what := set_of(gradients, missing)):
                says = (
                    f"The reported gradient norm {reported:.6g} leaves out {what}: all gradients that the optimizer "
                    f"saw have the norm {actual:.6g}, and without these {reported:.6g}."
                )
            elif missing < 0.0 and (found := counted_often(gradients, -missing)):
                what, times = found
                says = (
                    f"The reported gradient norm {reported:.6g} counts {what} {times}: the gradients that the "
                    f"optimizer saw have the norm {actual:.6g}."
                )
            elif round(scale) >= 1 and abs(scale - round(scale)) <= 4.0 * tolerance:
                what = f"{2 ** round(scale)} x"
                says = (
                    f"The reported gradient norm {reported:.6g} is {what} that of the gradients that the optimizer "
                    f"saw, {actual:.6g}: taken before the loss scale was divided out?"
                )
            else:
                continue
            apart = abs(reported / actual - 1.0)
            evidence = {"what": what, "reported": reported, "recomputed": actual}
            yield finding_at(
                entry, step=step, kind="reported-norm", says=says, evidence=evidence, difference=apart, floor=tolerance
            )


def _scalings(table: Mapping[Key, Entry], gradients: Gradients, *, step: int) -> Iterable[Finding]:
    """A clip coefficient, or a loss scale, that the gradients do not show, or show twice.

    The norm before clipping is that of the micro-batches' contributions (`grad.micro`, one per step), or else the
    reported one; that may itself be taken after clipping, so then only clipping twice can be told.
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
        says = (
            f"A clip coefficient of {coefficient:.4g} is reported, but {how}: their norm is {gradients.norm:.4g}, "
            f"and {before:.4g} before clipping."
        )
        evidence = {"reported": coefficient, "factor": factor}
        apart = abs(factor / coefficient - 1.0)
        yield finding_at(
            entry, step=step, kind="clip-coefficient", says=says, evidence=evidence, difference=apart, floor=near
        )
    for entry, scale in _logged(table, SCALES):
        if scale >= 2.0 and gradients.contributed and abs(factor * scale**2 - 1.0) <= near:
            says = (
                f"The gradients are divided by the loss scale {scale:g} twice: backward gave a norm of {before:.4g}, "
                f"and the optimizer saw {gradients.norm:.4g}."
            )
            evidence = {"reported": scale, "factor": factor}
            yield finding_at(
                entry, step=step, kind="loss-scale", says=says, evidence=evidence, difference=scale, floor=near
            )


def _logged(table: Mapping[Key, Entry], names: re.Pattern[str]) -> Iterable[tuple[Entry, float]]:
    """Scalars that the training logged once in the step, and the same on all ranks, under one of these names."""
    for key, entry in table.items():
        if key.phase == "loss" and key.slot == "logged" and key.call == 0 and names.fullmatch(key.path):
            value = number(entry.summary)
            once = len({part.micro_step for part in entry.parts}) <= 1
            alike = len({number(part.summary) for part in entry.parts}) <= 1  # on all ranks that reported it
            if once and alike and not entry.unobserved and math.isfinite(value):
                yield entry, value


def _is_round(value: float) -> bool:
    """Whether a norm is a number that somebody has chosen, to three digits: what gradients were clipped to."""
    return abs(value / float(f"{value:.3g}") - 1.0) <= 2e-5
