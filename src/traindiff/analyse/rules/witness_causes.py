"""Why a gradient is not what its inputs give: sums and multiples of what contributed to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from traindiff.analyse.findings import ranks_text
from traindiff.analyse.merge.witnessed import Term, Vector, Witnessed, rms
from traindiff.core.summary import norm_of

_AS_GOOD = 1.5
"""Of causes that fit within rounding, or within so many times the best of them, the simplest counts."""

_REST = 0.25
"""A cause leaves at most this part of the error: a factor that is fitted to four numbers always explains some of it."""

_SAME = 0.02
"""A gradient that is one contribution alone is it once, or as many times as there are of them, or one by that."""

_MOST_KEPT = 4.0
"""Clipping makes a gradient smaller before the next one is added, and a loss scale that falls makes it larger."""


class Cause(NamedTuple):
    """What explains a gradient.

    Attributes:
        name: For programs.
        message: A sentence.
        factor: The factor of all of the gradient, or of a part of it; 0 if there is none.
        micro_step: The micro-step that it is about.
        rank: The rank that it is about.
    """

    name: str
    message: str
    factor: float = 0.0
    micro_step: int | None = None
    rank: int | None = None


class Before(NamedTuple):
    """What is known of the step before: the probes of the gradient, and what was expected of it, and of each rank."""

    given: Vector
    expected: Vector
    of_ranks: Mapping[int, Vector]

    @classmethod
    def of(cls, one: Witnessed) -> Before:
        """What will be known of this step in the next one."""
        ranks = {part.rank: part.sums for part in _parts(one.terms) if part.rank is not None}
        return cls(one.given[0][1], one.expected, ranks)


def cause_of(one: Witnessed, given: Vector, before: Before | None, *, limit: float) -> Cause | None:
    """What explains a gradient within rounding; None if nothing does.

    Args:
        one: The gradient.
        given: Its probes on the ranks that are asked about.
        before: The same in the step before, if known.
        limit: Multiple of what rounding explains that the rest may have.
    """
    # The probes of a gradient whose elements are all of one size may be zero, too.
    if not given.any() and (len(one.given) > 1 or not norm_of(one.entry.summary)):
        return Cause("zero", f"The gradient is zero, which is not {one.right}.")
    fitting, most = [], _REST * rms(given - one.expected)
    for cause, whole in _candidates(one, given, before):
        size = max(rms(whole), rms(one.expected))
        allowed = one.allowed * max(1.0, size / (rms(one.expected) or 1.0))
        if rms(given - whole) <= min(limit * allowed, most) and limit * allowed < size:
            fitting.append((rms(given - whole) / (allowed or 1.0), cause))
    best = min((ratio for ratio, _ in fitting), default=0.0)
    return next((cause for ratio, cause in fitting if ratio <= max(1.0, _AS_GOOD * best)), None)


def micro_step_weights(found: Sequence[Witnessed], *, limit: float) -> list[float]:
    """How much of what each micro-step contributed all gradients hold; empty if they hold no such common parts.

    Args:
        found: The gradients of a step.
        limit: Multiple of what rounding explains that the rest may have.
    """
    steps = sorted({term.micro_step for one in found for term in one.terms})
    if len(steps) < 2 or len(steps) >= sum(one.given[0][1].size for one in found):
        return []
    tables, targets = [], []
    for one in found:
        sums = [[term.sums for term in one.terms if term.micro_step == step] for step in steps]
        columns = [np.sum(each, axis=0) if each else np.zeros_like(one.expected) for each in sums]
        tables.append(np.stack(columns, axis=1) / (one.allowed or 1.0))
        targets.append(one.given[0][1] / (one.allowed or 1.0))
    weights, *_ = np.linalg.lstsq(np.concatenate(tables), np.concatenate(targets), rcond=None)
    fits = all(rms(target - table @ weights) <= limit for table, target in zip(tables, targets, strict=True))
    return [float(weight) for weight in weights] if fits else []


class _Part(NamedTuple):
    """What one micro-step, one rank, or one rank in one micro-step contributed."""

    name: str
    micro_step: int | None
    rank: int | None
    sums: Vector


def _candidates(one: Witnessed, given: Vector, before: Before | None) -> Iterator[tuple[Cause, Vector]]:
    """Causes with the probes that each would give, from simple ones to special ones."""
    expected, parts = one.expected, _parts(one.terms)
    for factor in (2.0, 0.5, -1.0):
        yield _times(factor, one.right), factor * expected
    if before is not None:
        yield from _late(expected, before)
    for part in parts:
        yield from _once_more(expected, part)
        late = None if before is None or part.rank is None else before.of_ranks.get(part.rank)
        if late is not None:
            yield from _late_on_rank(expected, part, late)
    factor = _share(given, expected)
    yield _times(factor, one.right), factor * expected
    if before is not None:
        yield from _kept(expected, given, before)
    for part in parts:
        factor = _share(given, part.sums)
        of_sort = sum((other.rank is None) == (part.rank is None) for other in parts)
        if any(abs(factor - other) <= _SAME * other for other in (1.0, float(of_sort), 1.0 / of_sort)):
            times = "" if abs(factor - 1.0) <= _SAME else f"{factor:.4g} x "
            alone = "were the others lost?" if part.rank is None else "was it not reduced?"
            message = f"The gradient is {times}what {part.name} alone contributed: {alone}"
            yield Cause("alone", message, factor, part.micro_step, part.rank), factor * part.sums
        more = _share(given - expected, part.sums)
        message = f"The gradient holds {1.0 + more:.4g} x what {part.name} contributed."
        yield Cause("weighted", message, 1.0 + more, part.micro_step, part.rank), expected + more * part.sums
    if len({part.rank for part in parts}) > 1 and len({part.micro_step for part in parts}) > 1:
        for term in one.terms:
            name = f"rank {term.rank} in micro-step {term.micro_step}"
            yield from _once_more(expected, _Part(name, term.micro_step, term.rank, term.sums))


def _times(factor: float, right: str) -> Cause:
    message = f"The gradient is {factor:.4g} x {right}."
    return Cause("factor", message, factor)


def _late(expected: Vector, before: Before) -> Iterator[tuple[Cause, Vector]]:
    """Gradients of the step before."""
    message = "The gradient is the one of the step before: what this step computed did not reach it."
    yield Cause("stale", message), before.given
    yield Cause("stale", message), before.expected
    message = "The gradient also holds the one of the step before: was zero_grad() left out?"
    yield Cause("kept", message, 1.0), expected + before.given


def _kept(expected: Vector, given: Vector, before: Before) -> Iterator[tuple[Cause, Vector]]:
    """A multiple of the gradient of the step before; if the batch is the same, a multiple of this one is simpler."""
    share = _share(given - expected, before.given)
    if not 0.0 < share <= _MOST_KEPT:
        return
    message = f"The gradient also holds {share:.4g} x the one of the step before: was zero_grad() left out?"
    yield Cause("kept", message, share), expected + share * before.given


def _late_on_rank(expected: Vector, part: _Part, before: Vector) -> Iterator[tuple[Cause, Vector]]:
    """What one rank contributed to the step before."""
    message = f"The gradient holds what {part.name} contributed to the step before, in place of what it computed now."
    yield Cause("stale", message, 0.0, None, part.rank), expected - part.sums + before
    message = f"The gradient also holds what {part.name} contributed to the step before."
    yield Cause("kept", message, 1.0, None, part.rank), expected + before


def _once_more(expected: Vector, part: _Part) -> Iterator[tuple[Cause, Vector]]:
    """Contributions that are missing, or there twice."""
    message = f"The gradient lacks what {part.name} contributed."
    yield Cause("lost", message, -1.0, part.micro_step, part.rank), expected - part.sums
    message = f"The gradient holds twice what {part.name} contributed."
    yield Cause("twice", message, 1.0, part.micro_step, part.rank), expected + part.sums


def _parts(terms: Sequence[Term]) -> list[_Part]:
    """What each micro-step and each rank contributed, if there are several."""
    found: list[_Part] = []
    steps = list(dict.fromkeys(term.micro_step for term in terms))
    ranks = list(dict.fromkeys(term.rank for term in terms))
    if len(steps) > 1:
        for step in steps:
            sums = np.sum([term.sums for term in terms if term.micro_step == step], axis=0)
            found.append(_Part(f"micro-step {step} of {len(steps)}", step, None, sums))
    if len(ranks) > 1:
        for rank in ranks:
            sums = np.sum([term.sums for term in terms if term.rank == rank], axis=0)
            found.append(_Part(f"rank {rank} of {len(ranks)}", None, rank, sums))
    return found


def _share(target: Vector, part: Vector) -> float:
    """The multiple of a part that is nearest to a target."""
    power = float(part @ part)
    return float(part @ target) / power if power else 0.0


def on_ranks(ranks: Sequence[int], num_ranks: int) -> str:
    """` on rank 1`, if not on all ranks."""
    return "" if len(ranks) == num_ranks else f" on {ranks_text(ranks, capital=False)}"
