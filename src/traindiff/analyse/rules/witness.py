"""Each gradient follows from the inputs of its layer and the gradients of its outputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from math import prod
from statistics import median
from typing import NamedTuple

from traindiff.analyse.findings import Finding, listed_text
from traindiff.analyse.merge.site import SiteKey, StepTable, finding_at
from traindiff.analyse.merge.witnessed import Vector, Witnessed, rms, witnessed
from traindiff.analyse.rules.ranks_apart import RanksApart
from traindiff.analyse.rules.rule import Contents, Limit, Rule
from traindiff.analyse.rules.witness_causes import Before, Cause, cause_of, micro_step_weights, on_ranks
from traindiff.core.observation import BY_HAND, CARRIED, FLIPPED, WITNESS
from traindiff.core.summary import nonfinite_count
from traindiff.core.witness import EXPECTED

_SAME_FACTOR = 1e-2

_FEW_OTHERS = 0.25
"""Share of the gradients that may have another factor than all the others, and be wrong: more are meant, by layer."""

_OF_WRITES = ("factor", "stale", "weighted")
"""Causes that writes may have, too: a gradient that is clamped at all of its elements may be the same in two steps, and
one that is multiplied between two micro-steps holds another share of the first."""

_WRITTEN = " The training itself wrote to it after the backward pass: a mask, clipping, or a term that it added?"

WRITTEN = "the training itself changes all gradients after the backward pass"

_MOST_WEIGHTS = 4


class _Wrong(NamedTuple):
    one: Witnessed
    ranks: tuple[int, ...]
    given: Vector
    cause: Cause | None


class GradientsFollow(Rule):
    """The gradient that an optimizer is given does not follow from what its layer was given and returned.

    Needs `observe="witness"`. For random signs a and b, `aᵀ (dL/dW) b` is compared with the sum over rows of
    `(g·a)(x·b)`: x is what the layer was given, g the gradient of what it returned (Freivalds 1977). The root mean
    square of the differences is the size of the error of the gradient, whatever made it. It is held against the
    rounding of this gradient. If nothing tells what the operations on a parameter should contribute, the gradient is
    compared with the sum of what backward passes contributed to it. See `traindiff explain witness`.

    Not findings: a factor that is common to all gradients, or any change of all gradients, if the training itself wrote
    to them after the backward pass (clipping by hand, noise); and a sum over ranks by hand in place of their mean. A
    note says so. Where the training wrote to some gradients only, from the first step on, to make them smaller, or to
    add something to several of them (a mask, clipping one by one, a penalty by hand), it is a warning. So it is if
    it wrote to all gradients between micro-steps, and these count unequally. One gradient that has another factor
    than all the others is a finding.
    """

    name = "wrong-gradient"
    finds = "A gradient is not what the inputs and outputs of its layer give."
    needs = 'witnessed gradients, which record(observe=[..., "witness"]) records'
    tells_runs_apart = True
    judges_sizes = True
    limits = {  # noqa: RUF012  as in all rules
        "roundings": Limit(
            default=4.0,
            message="Smallest error that is a finding, in multiples of what rounding explains. Right gradients stay "
            "below 2.",
        ),
    }

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return WITNESS in contents.stages

    def begin(self) -> None:
        """Nothing was seen so far."""
        self._before: dict[str, tuple[int, Before]] = {}
        self._changed: dict[str, list[int]] = {}  # steps, by a sentence about all gradients
        self._right: set[str] = set()  # gradients that were right in a step before
        self._sizes: dict[str, int] = {}
        self._apart = RanksApart(self.facts)
        self._perhaps: dict[str, Finding] = {}  # the first of each gradient that the training wrote to
        self._uneven: Finding | None = None  # the first step in which micro-steps count unequally in all gradients
        self._all_changed: set[str] = set()  # gradients that it changed together with all others
        self._edited: set[str] = set()  # gradients that the training wrote to, in some step so far
        self._alone: set[str] = set()  # gradients that are the only ones of their optimizer
        self._checked: set[str] = set()
        self._contributed: set[str] = set()
        self._reasons: dict[str, str] = {}
        self._missed: Counter[str] = Counter()  # steps in which a gradient was there and not checked
        self._num_steps = 0

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """Findings of a step."""
        self._apart.look(table, step=step)
        found = witnessed(table, self.facts.reduced_in)
        self._note_coverage(table, found)
        limit = self.limit("roundings") / self.strictness
        told = {key.path for key in table if key.phase == "grad" and key.stage in (CARRIED, FLIPPED)}
        wrong = [
            _Wrong(one, ranks, given, cause_of(one, given, self._known(one, step), limit=limit))
            for one in found
            if one.entry.key.path not in told  # `carried-gradient` or `bit-flip` says why it must be wrong
            for ranks, given in one.given
            if rms(given - one.expected) > limit * one.allowed
        ]
        self._edited.update(one.entry.key.path for one in found if one.edited)
        for one in found:
            self._before[one.entry.key.path] = step, Before.of(one)
        paths = {one.entry.key.path for one in found}
        change = _of_all(wrong, found, by_hand=self.facts.engine == BY_HAND) if wrong else None
        if change is not None:
            self._changed.setdefault(change.sentence, []).append(step)
            if not change.is_witnessed:
                self._all_changed |= paths
                self._reasons.update((one.entry.key.path, WRITTEN) for one in found)
                self._note_uneven(found, step, limit)
                return
            wrong = [*change.others]
            self._all_changed |= paths - {one.one.entry.key.path for one in wrong}
        self._checked |= paths
        self._contributed.update(one.entry.key.path for one in found if one.contributed)
        right = paths - {one.one.entry.key.path for one in wrong} - told
        # A term that a training adds in every step may be zero in the first.
        self._right |= right if change is not None else right - self._edited
        several = len({one.one.entry.key.path for one in wrong if one.one.edited and one.cause is None}) > 1
        several &= all(one.one.edited and one.cause is None for one in wrong)
        for fault in wrong:
            if (path := fault.one.entry.key.path) not in told:
                told.add(path)
                same = [one for one in wrong if one.one.entry.key.path == path]
                alone = _not_reduced(same)
                if alone is None:
                    finding = self._finding(fault, step, several=several)
                    if self.is_warning(finding):
                        self._perhaps.setdefault(path, finding)
                        if len(found) == 1:
                            self._alone.add(path)
                    else:
                        yield finding
                elif path not in self.facts.not_reduced:
                    yield from self._apart.hold(self._finding(alone, step))

    def end(self) -> Iterator[Finding]:
        """Findings about gradients that were not reduced, and whose parameters ranks never made equal again.

        And warnings of those that the training wrote to, unless it changes all gradients: in other steps, or of other
        optimizers.
        """
        yield from self._apart.left()
        meant = self._all_changed | (self._alone if self._changed else set())
        yield from (one for path, one in self._perhaps.items() if path not in meant)
        if self._uneven is not None:
            yield self._uneven

    def is_warning(self, finding: Finding) -> bool:
        """True if the training wrote to the gradient, and nothing tells that this was not meant."""
        return bool(finding.evidence.get("may_be_meant"))

    def notes(self) -> Iterator[str]:
        """How much was checked, and why not everything."""
        for sentence, steps in self._changed.items():
            yield sentence.format(steps=f"{len(steps)} step{'s' if len(steps) > 1 else ''}, first {steps[0]}")
        if not self._checked and not self._reasons:
            return
        whole = sum(self._sizes.values())
        known = self._checked - self._contributed
        yield f"Witnessed are the gradients of {self._share(known):.1%} of {whole:,} parameters."
        if self._contributed:
            yield (
                f"Of {self._share(self._contributed):.1%}, the witness knows what backward passes contributed, but not "
                "what these should contribute, because not all that is done with them is of a kind that it knows "
                "(compiled code, hooks, penalties, parametrizations, some functions): "
                f"{listed_text(sorted(self._contributed), 'parameter')}."
            )
        by_reason: dict[str, list[str]] = {}
        for path, reason in self._reasons.items():
            if path not in self._checked:
                by_reason.setdefault(reason, []).append(path)
        for reason, paths in by_reason.items():
            yield f"Not witnessed: {listed_text(paths, 'parameter')}, because {reason}."
        missed = {path: count for path, count in self._missed.items() if count and path in self._checked}
        if missed:
            reasons = dict.fromkeys(self._reasons[path] for path in missed if path in self._reasons)
            why = f", because {' or because '.join(reasons)}" if reasons else ""
            yield (
                f"Not witnessed in {max(missed.values())} of {self._num_steps} steps: "
                f"{listed_text([*missed], 'parameter')}{why}."
            )

    def _share(self, paths: Collection[str]) -> float:
        """The share of the elements of all parameters that these have."""
        whole = sum(self._sizes.values())
        return sum(size for path, size in self._sizes.items() if path in paths) / (whole or 1)

    def _note_coverage(self, table: StepTable, found: Sequence[Witnessed]) -> None:
        checked = {one.entry.key.path for one in found}
        self._num_steps += 1
        for key, entry in table.items():
            if key.phase != "grad":
                continue
            if key == SiteKey("grad", "", key.path, "grad") and not entry.unobserved:
                self._sizes[key.path] = prod(entry.shape)
                is_known = float(entry.summary["sum_of_squares"]) > 0.0 and not nonfinite_count(entry.summary)
                self._missed[key.path] += is_known and key.path not in checked
            elif key.stage == WITNESS and key.slot == EXPECTED and entry.unobserved:
                self._reasons.setdefault(key.path, entry.unobserved)

    def _known(self, one: Witnessed, step: int) -> Before | None:
        """The step before, if it was recorded."""
        seen, before = self._before.get(one.entry.key.path, (-1, None))
        return before if seen == step - 1 else None

    def _note_uneven(self, found: Sequence[Witnessed], step: int, limit: float) -> None:
        """Note the first step in which the training has made micro-steps count unequally, in all gradients alike."""
        weights = micro_step_weights(found, limit=limit) if self._uneven is None else []
        if not weights or max(weights) - min(weights) <= _SAME_FACTOR * max(map(abs, weights)):
            return
        shown = ", ".join(f"{weight:.3g}" for weight in weights[:_MOST_WEIGHTS])
        message = (
            f"All gradients hold unequal parts of what micro-steps contributed: {shown}"
            f"{', ...' if len(weights) > _MOST_WEIGHTS else ''}. The training wrote to them between backward passes. "
            "Does a division that belongs behind the loop over micro-steps stand in it?"
        )
        self._uneven = finding_at(
            found[0].entry, step=step, kind=self.kinds[0], message=message,
            evidence={"cause": "uneven", "weights": weights, "edited": True, "may_be_meant": True},
        )  # fmt: skip

    def _may_be_meant(self, one: Witnessed, cause: Cause | None, *, several: bool) -> bool:
        """True if the training wrote to a gradient, and seems to do so always, or to several, or made it smaller.

        What came out is no contribution that is lost, late or there twice.
        """
        if (
            one.entry.key.path not in self._edited
            or len(one.given) != 1
            or (cause is not None and cause.name != "factor")
        ):
            return False  # ranks that should hold the same do not, or it is no such change
        smaller = cause is not None and 0.0 < cause.factor < 1.0
        return several or smaller or one.entry.key.path not in self._right

    def _finding(self, wrong: _Wrong, step: int, *, several: bool = False) -> Finding:
        one, cause = wrong.one, wrong.cause
        num_ranks = sum(len(ranks) for ranks, _ in one.given)
        where = on_ranks(wrong.ranks, num_ranks)
        meant = self._may_be_meant(one, cause, several=several)
        written = _WRITTEN if meant or (one.edited and cause is None) else ""
        size = one.size or 1.0
        error, allowed = rms(wrong.given - one.expected) / size, one.allowed / size
        message = (
            f"The gradient is not {one.right}: relative error {error:.2g}; rounding explains {allowed:.1g}."
            if cause is None
            else cause.message
        ) + written
        if where:
            message = message.replace("The gradient", f"The gradient{where}", 1)
        rank = cause.rank if cause is not None else None
        return finding_at(
            one.entry, step=step, kind=self.kinds[0], message=message,
            rank=wrong.ranks[0] if where and len(wrong.ranks) == 1 else rank,
            micro_step=None if cause is None else cause.micro_step,
            difference=error, floor=allowed * self.limit("roundings"),
            evidence={
                "cause": "unknown" if cause is None else cause.name, "factor": 1.0 if cause is None else cause.factor,
                "edited": one.edited, "may_be_meant": meant,
            },
        )  # fmt: skip


def _not_reduced(wrong: Sequence[_Wrong]) -> _Wrong | None:
    """One fault for all ranks if each holds what it alone contributed."""
    causes = [one.cause for one in wrong if one.cause is not None and (one.cause.rank,) == one.ranks]
    if len(wrong) < 2 or len(causes) < len(wrong) or any(one.name != "alone" for one in causes):
        return None
    ranks = tuple(rank for one in wrong for rank in one.ranks)
    message = "The gradient on each rank is what that rank alone contributed: was it not reduced?"
    return wrong[0]._replace(ranks=ranks, cause=Cause("alone", message, causes[0].factor))


class _Change(NamedTuple):
    """What the training did to all gradients.

    Attributes:
        sentence: It, with a place for the steps.
        is_witnessed: Whether the gradients are known but for a factor.
        others: Few gradients that another factor has, as if all had been divided by the common one.
    """

    sentence: str
    is_witnessed: bool = True
    others: Sequence[_Wrong] = ()


def _of_all(wrong: Sequence[_Wrong], found: Sequence[Witnessed], *, by_hand: bool) -> _Change | None:
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
    summed = all_by_factors and all(abs(factor - ranks) <= _SAME_FACTOR * ranks for factor in factors)
    if by_hand and ranks > 1 and summed:
        return _Change(
            sentence="All gradients are the sum over ranks of what each contributed, not the mean ({steps})."
        )
    if not all(one.edited for one in touched):
        return None
    if not all_by_factors:
        return _Change(
            sentence="The training changes gradients after the backward pass ({steps}), so they were not witnessed "
            "there.",
            is_witnessed=False,
        )
    common = median(factors)
    others = [
        one._replace(cause=_beside(one.cause.factor / common, common, one.one.right))
        for one in wrong
        if one.cause is not None and abs(one.cause.factor - common) > _SAME_FACTOR * abs(common)
    ]
    if len(others) > _FEW_OTHERS * len(touched):
        return _Change(sentence="The training multiplies gradients by factors after the backward pass ({steps}).")
    return _Change(
        sentence="The training multiplies all gradients by one factor after the backward pass ({steps}).", others=others
    )


def _beside(factor: float, common: float, right: str) -> Cause:
    """The cause of a gradient that has another factor than all the others."""
    message = f"The gradient is {factor:.4g} x {right}, beside the factor {common:.4g} that all others have."
    return Cause("factor", message, factor)
