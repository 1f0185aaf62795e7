"""Whether the numbers of one run agree with each other: what it reports, and what was recorded of it.

Only what can be derived is judged. A reported norm may be of the gradients before or after clipping, smoothed, or
of another order: it is found wrong only where what is left out, or counted twice, can be named.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from traindiff.comparison.floors import UNIT_ROUNDOFF
from traindiff.comparison.presence import NO_GRADIENT
from traindiff.comparison.step_table import Entry, Key
from traindiff.comparison.verdict import Finding
from traindiff.summary import nonfinite_count, norm

NORMS = re.compile(r"(.*[./_ -])?(grad(ient)?s?[._ -]?norm|total[._ -]?norm|gnorm)", re.IGNORECASE)
"""Names under which trainings log the norm of all gradients."""

COEFFICIENTS = re.compile(r"(.*[./ -])?(grad_)?clip(ping)?_?(coef|coeff|coefficient|factor)", re.IGNORECASE)
"""Names under which trainings log the factor by which clipping multiplied the gradients."""

SCALES = re.compile(r"(.*[./ -])?(loss_?|grad_?)?scale", re.IGNORECASE)
"""Names under which trainings log the scale of the loss."""

SHARP = 1e-4
"""Largest tolerance at which an equality of norms says something: there are hundreds of sets of parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What does not change during a run.

    Attributes:
        complete: Whether all parameters of one optimizer were recorded, on all ranks.
        modules: Class name of each module by path.
        tied: Path of a parameter by each of its further names.
    """

    complete: bool = False
    modules: Mapping[str, str] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)


def consistency_findings(
    table: Mapping[Key, Entry], facts: RunFacts, *, step: int, strictness: float = 1.0
) -> list[Finding]:
    """What contradicts itself in one step of one run.

    Args:
        table: The step.
        facts: What is known of the run.
        step: Number of the step.
        strictness: Divides the tolerances: a larger one finds more.
    """
    gradients = Gradients.of(table, facts)
    found = [] if gradients is None else [*norm_findings(table, gradients, step=step, strictness=strictness)]
    found += [] if gradients is None else [*scaling_findings(table, gradients, step=step)]
    return [*found, *tied_findings(table, facts, step=step)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """The gradients with which an optimizer was called.

    Attributes:
        squares: Sum of squares by path.
        copied: Those of which several ranks hold copies.
        divided: Those of which several ranks hold a part each.
        ranks: How many ranks hold any.
        dimensions: Number of axes by path.
        contributed: Norm of what backward gave before anything was done to it; None where it is not known.
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

    @classmethod
    def of(cls, table: Mapping[Key, Entry], facts: RunFacts) -> Gradients | None:
        """The gradients of a step; None where they are not all known, or not all finite."""
        entries = {key.path: entry for key, entry in table.items() if key.phase == "grad" and not key.stage}
        unknown = [e for e in entries.values() if e.unobserved and not e.unobserved.startswith(NO_GRADIENT)]
        entries = {path: entry for path, entry in entries.items() if not entry.unobserved}
        if not facts.complete or unknown or not entries:
            return None
        if any(nonfinite_count(entry.summary) or not entry.exact or entry.apart for entry in entries.values()):
            return None
        shards = {path: {part.shard for part in entry.parts} for path, entry in entries.items()}
        u = max(UNIT_ROUNDOFF.get(entry.dtype, 0.0) for entry in entries.values())
        count = sum(int(entry.summary["count"]) for entry in entries.values())
        micro = [table.get(Key("grad", "micro", path, "grad", 0, 0)) for path in entries]
        known = all(one is not None and one.exact and not one.unobserved for one in micro)
        return cls(
            squares={path: float(entry.summary["sum_of_squares"]) for path, entry in entries.items()},
            copied=frozenset(path for path, entry in entries.items() if len(shards[path]) == 1 < len(entry.parts)),
            divided=frozenset(path for path, held in shards.items() if len(held) > 1),
            ranks=len({part.rank for entry in entries.values() for part in entry.parts}),
            dimensions={path: len(entry.shape) for path, entry in entries.items()},
            contributed=math.sqrt(sum(float(norm(e.summary)) ** 2 for e in micro if e is not None)) if known else None,
            # Short dtypes round the norm of each tensor, and of all of them; float32 may add up in any order.
            tolerance=4.0 * u if u > UNIT_ROUNDOFF["float32"] else max(64.0, math.sqrt(count)) * u,
        )


def norm_findings(
    table: Mapping[Key, Entry], gradients: Gradients, *, step: int, strictness: float = 1.0
) -> Iterable[Finding]:
    """A reported gradient norm that leaves out some parameters, counts some twice, or is scaled."""
    tolerance = gradients.tolerance / strictness
    actual = gradients.norm
    for entry, reported in _logged(table, NORMS):
        if gradients.tolerance > SHARP or not actual or not reported > 0.0:
            continue
        missing = 1.0 - (reported / actual) ** 2
        if abs(missing) <= 4.0 * tolerance or (missing < 0.0 and _is_round(actual)):
            continue  # the same, or clipped to a round number
        scale = math.log2(reported / actual)
        if missing > 0.0 and (what := _set_of(gradients, missing)):
            says = (
                f"the reported gradient norm {reported:.6g} leaves out {what}: all gradients that the optimizer saw "
                f"have the norm {actual:.6g}, and without these {reported:.6g}."
            )
        elif missing < 0.0 and (found := _counted_often(gradients, -missing)):
            what, times = found
            says = (
                f"the reported gradient norm {reported:.6g} counts {what} {times}: the gradients that the optimizer "
                f"saw have the norm {actual:.6g}."
            )
        elif round(scale) >= 1 and abs(scale - round(scale)) <= 4.0 * tolerance:
            what = f"{2 ** round(scale)} x"
            says = (
                f"the reported gradient norm {reported:.6g} is {what} that of the gradients that the optimizer saw, "
                f"{actual:.6g}: taken before the loss scale was divided out?"
            )
        else:
            continue
        apart = abs(reported / actual - 1.0)
        evidence = {"what": what, "reported": reported, "recomputed": actual}
        yield _finding(entry, step=step, kind="reported-norm", says=says, evidence=evidence, sizes=(apart, tolerance))


def scaling_findings(table: Mapping[Key, Entry], gradients: Gradients, *, step: int) -> Iterable[Finding]:
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
            f"a clip coefficient of {coefficient:.4g} is reported, but {how}: their norm is {gradients.norm:.4g}, "
            f"and {before:.4g} before clipping."
        )
        evidence = {"reported": coefficient, "factor": factor}
        apart = abs(factor / coefficient - 1.0)
        yield _finding(entry, step=step, kind="clip-coefficient", says=says, evidence=evidence, sizes=(apart, near))
    for entry, scale in _logged(table, SCALES):
        if scale >= 2.0 and gradients.contributed and abs(factor * scale**2 - 1.0) <= near:
            says = (
                f"the gradients are divided by the loss scale {scale:g} twice: backward gave a norm of {before:.4g}, "
                f"and the optimizer saw {gradients.norm:.4g}."
            )
            evidence = {"reported": scale, "factor": factor}
            yield _finding(entry, step=step, kind="loss-scale", says=says, evidence=evidence, sizes=(scale, near))


def tied_findings(table: Mapping[Key, Entry], facts: RunFacts, *, step: int) -> Iterable[Finding]:
    """An embedding that is also the head, and whose gradient lacks what the head contributes.

    A softmax over the vocabulary sends a gradient to every row of the head, an embedding to the rows of the tokens
    in the batch only. So rows of zeros in the gradient, where no element of the gradient at the head's output is
    zero, mean that the head's part is lost. The reverse, and weights that are tied otherwise, cannot be told from
    summaries of one run.
    """
    for other, path in facts.tied.items():
        names = [name.rpartition(".")[0] for name in (other, path)]
        heads = [name for name in names if facts.modules.get(name) == "Linear"]
        gradient = table.get(Key("grad", "", path, "grad", 0, 0))
        if len(heads) != 1 or not {facts.modules.get(name) for name in names} & {"Embedding"} or gradient is None:
            continue
        output = table.get(Key("backward", "", heads[0], "output[0]", 0, 0))
        if output is None or output.unobserved or gradient.unobserved or len(gradient.shape) != 2:
            continue
        if not gradient.exact or int(output.summary["zero"]) or nonfinite_count(output.summary):
            continue
        zeros, width = int(gradient.summary["zero"]), gradient.shape[1]
        if zeros < width or UNIT_ROUNDOFF.get(gradient.dtype, 1.0) > UNIT_ROUNDOFF["float32"]:
            continue  # elements of short dtypes may underflow
        says = (
            f"the gradient of {path}, which is also {other}, lacks what {heads[0]} contributes: {zeros // width} of "
            f"its {gradient.shape[0]} rows are zero, and the gradient at the output of {heads[0]} is so nowhere."
        )
        evidence = {"zero_rows": zeros // width}
        yield _finding(gradient, step=step, kind="tied-gradient", says=says, evidence=evidence, sizes=(math.inf, 0.0))


def _logged(table: Mapping[Key, Entry], names: re.Pattern[str]) -> Iterable[tuple[Entry, float]]:
    """Scalars that the training logged once in the step, and the same on all ranks, under one of these names."""
    for key, entry in table.items():
        if key.phase == "loss" and key.slot == "logged" and key.call == 0 and names.fullmatch(key.path):
            value = float(entry.summary["sum"])
            once = len({part.micro_step for part in entry.parts}) <= 1
            alike = len({float(part.summary["sum"]) for part in entry.parts}) <= 1  # on all ranks that reported it
            if once and alike and not entry.unobserved and math.isfinite(value):
                yield entry, value


def _set_of(gradients: Gradients, share: float) -> str:
    """The parameters whose gradients hold this share of all squares, in words; empty where none do, or several."""
    whole = sum(gradients.squares.values())
    near = 4.0 * gradients.tolerance
    found: dict[frozenset[str], str] = {}
    for words, paths in _sets(gradients):
        part = sum(gradients.squares[path] for path in paths) / whole
        if 10.0 * near < part and abs(part - share) <= near and len(paths) < len(gradients.squares):
            found.setdefault(paths, words)
    return next(iter(found.values())) if len(found) == 1 else ""


def _counted_often(gradients: Gradients, excess: float) -> tuple[str, str] | None:
    """The parameters that account for so many more squares than there are, and how often they are counted."""
    for times in sorted({2, gradients.ranks} - {1}):
        if what := _set_of(gradients, excess / (times - 1)):
            return what, "twice" if times == 2 else f"{times} times"
    return None


def _sets(gradients: Gradients) -> Iterable[tuple[str, frozenset[str]]]:
    """Sets of parameters that a training may treat apart, and what to call them."""
    by_name: dict[str, set[str]] = {}
    for path in gradients.squares:
        parts = path.split(".")
        yield path, frozenset({path})
        for depth in range(1, len(parts)):
            by_name.setdefault(f"{'.'.join(parts[:depth])}.*", set()).add(path)
            by_name.setdefault(f"*.{'.'.join(parts[depth:])}", set()).add(path)
    for least, words in (
        (1, "all parameters with one axis (biases, norms)"),
        (2, "all parameters with two axes or more"),
    ):
        alike = [path for path, axes in gradients.dimensions.items() if (axes > 1) == (least > 1)]
        yield words, frozenset(alike)
    yield "all parameters of which ranks hold copies", gradients.copied
    yield "all parameters that are divided over ranks", gradients.divided
    yield from ((f"all of {name}", frozenset(paths)) for name, paths in by_name.items() if len(paths) > 1)


def _is_round(value: float) -> bool:
    """Whether a norm is a number that somebody has chosen, to three digits: what gradients were clipped to."""
    return abs(value / float(f"{value:.3g}") - 1.0) <= 2e-5


def _finding(
    entry: Entry, *, step: int, kind: str, says: str, evidence: Mapping[str, Any], sizes: tuple[float, float]
) -> Finding:
    key = entry.key
    return Finding(
        step=step, micro_step=None, rank=None, phase=key.phase, stage=key.stage, path=key.path, slot=key.slot,
        call=key.call, order=entry.order, kind=kind, difference=sizes[0], floor=sizes[1], says=says, evidence=evidence,
    )  # fmt: skip
