"""What a training itself has done to all gradients of a step, after the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from traindiff.analyse.merge.witnessed import Vector, Witnessed
from traindiff.analyse.rules.witness_causes import Cause

SAME_FACTOR = 1e-2
"""Relative distance of two factors that are called equal."""

_FEW_OTHERS = 0.25
"""Share of the gradients that may have another factor than all the others, and be wrong: more are meant, by layer."""

_OF_WRITES = ("factor", "stale", "weighted")
"""Causes that writes may have, too: a gradient that is clamped at all of its elements may be the same in two steps, and
one that is multiplied between two micro-steps holds another share of the first."""


class Wrong(NamedTuple):
    """A gradient that is not what was expected of it, with the ranks that hold it, its probes there, and the cause."""

    one: Witnessed
    ranks: tuple[int, ...]
    given: Vector
    cause: Cause | None

    @property
    def path(self) -> str:
        """The parameter's path."""
        return self.one.entry.key.path


class Change(NamedTuple):
    """What the training did to all gradients.

    Attributes:
        sentence: It, with a place for the steps.
        is_witnessed: Whether the gradients are known but for a factor.
        others: Few gradients that another factor has, as if all had been divided by the common one.
    """

    sentence: str
    is_witnessed: bool = True
    others: Sequence[Wrong] = ()


def change_of_all(wrong: Sequence[Wrong], found: Sequence[Witnessed], *, by_hand: bool) -> Change | None:
    """A change of all gradients by the training; None if it is no such change.

    Args:
        wrong: The gradients that are not what was expected of them.
        found: All that are known.
        by_hand: Whether several ranks share the batch and nothing that is known reduces their gradients.
    """
    touched = [one for one in found if one.expected.any()]
    causes = [one.cause for one in wrong if one.cause is not None]
    if (
        len(touched) < 2
        or any(len(one.one.given) != 1 for one in wrong)
        or any(one.name not in _OF_WRITES or one.rank is not None for one in causes)
    ):
        return None
    factors = [one.factor for one in causes if one.name == "factor"]
    all_by_factors = len(factors) == len(wrong) == len(touched)
    ranks = max(len({term.rank for term in one.terms}) for one in touched)
    summed = all_by_factors and all(abs(factor - ranks) <= SAME_FACTOR * ranks for factor in factors)
    if by_hand and ranks > 1 and summed:
        return Change(sentence="All gradients are the sum over ranks of what each contributed, not the mean ({steps}).")
    if not all(one.edited for one in touched):
        return None
    if not all_by_factors:
        return Change(
            sentence="The training changes gradients after the backward pass ({steps}), so they were not witnessed "
            "there.",
            is_witnessed=False,
        )
    common = median(factors)
    others = [
        one._replace(cause=_beside(one.cause.factor / common, common, one.one.right))
        for one in wrong
        if one.cause is not None and abs(one.cause.factor - common) > SAME_FACTOR * abs(common)
    ]
    if len(others) > _FEW_OTHERS * len(touched):
        return Change(sentence="The training multiplies gradients by factors after the backward pass ({steps}).")
    return Change(
        sentence="The training multiplies all gradients by one factor after the backward pass ({steps}).", others=others
    )


def _beside(factor: float, common: float, right: str) -> Cause:
    """The cause of a gradient that has another factor than all the others."""
    message = f"The gradient is {factor:.4g} x {right}, beside the factor {common:.4g} that all others have."
    return Cause("factor", message, factor)
