"""Each gradient follows from the inputs of its layer and the gradients of its outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.indexed import sites
from traindiff.analyse.merge.site import StepTable, finding_at
from traindiff.analyse.merge.witnessed import Witnessed, rms, witnessed
from traindiff.analyse.rules.ranks_apart import RanksApart
from traindiff.analyse.rules.rule import Contents, Limit, Rule, RunFacts
from traindiff.analyse.rules.witness_causes import Before, Cause, cause_of, micro_step_weights, on_ranks
from traindiff.analyse.rules.witness_changes import SAME_FACTOR, Wrong, change_of_all
from traindiff.analyse.rules.witness_compiled import CompiledCode
from traindiff.analyse.rules.witness_coverage import Coverage
from traindiff.core.observation import BY_HAND, CARRIED, FLIPPED, WITNESS

_WRITTEN = " The training itself wrote to it after the backward pass: a mask, clipping, or a term that it added?"

_MOST_WEIGHTS = 4


class GradientsFollow(Rule):
    """The gradient that an optimizer is given does not follow from what its layer was given and returned.

    Needs `observe="witness"`. For random signs a and b, `aᵀ (dL/dW) b` is compared with the sum over rows of
    `(g·a)(x·b)`: x is what the layer was given, g the gradient of what it returned (Freivalds 1977). The root mean
    square of the differences is the size of the error of the gradient, whatever made it. It is held against the
    rounding of this gradient. If nothing tells what the operations on a parameter should contribute, the gradient is
    compared with the sum of what backward passes contributed to it. So it is in compiled code, whose layers may prove
    what it contributed; if they do so in most steps only, a note says it. See `traindiff explain witness`.

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
        self._right: set[str] = set()  # gradients that were right in a step before, and not zero
        self._untouched: set[str] = set()  # right ones, zero or not, to which the training had not written until then
        self._apart = RanksApart(self.facts)
        self._perhaps: dict[str, Finding] = {}  # the first of each gradient that the training wrote to
        self._uneven: Finding | None = None  # the first step in which micro-steps count unequally in all gradients
        self._all_changed: set[str] = set()  # gradients that it changed together with all others
        self._edited: set[str] = set()  # gradients that the training wrote to, in some step so far
        self._alone: set[str] = set()  # gradients that are the only ones of their optimizer
        self._coverage = Coverage()
        self._compiled = CompiledCode()

    def learn(self, facts: RunFacts) -> None:
        """`Rule.learn`."""
        super().learn(facts)
        self._apart.learn(facts)

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """Findings of a step."""
        self._apart.look(table, step=step)
        found = witnessed(table, self.facts.reduced_in)
        self._coverage.see(table, found)
        self._compiled.see(found, step=step)
        limit = self.limit("roundings")
        told = {key.path for key, _ in sites(table, "grad") if key.stage in (CARRIED, FLIPPED)}
        wrong = [
            Wrong(one, ranks, given, cause_of(one, given, self._known(one, step), limit=limit))
            for one in found
            if one.entry.key.path not in told  # `carried-gradient` or `bit-flip` says why it must be wrong
            for ranks, given in one.given
            if rms(given - one.expected) > limit / self.strictness * one.allowed
        ]
        clear = [one for one in wrong if rms(one.given - one.one.expected) > limit * one.one.allowed]
        self._edited.update(one.entry.key.path for one in found if one.edited)
        for one in found:
            self._before[one.entry.key.path] = step, Before.of(one)
        paths = {one.entry.key.path for one in found}
        change = change_of_all(clear, found, by_hand=self.facts.engine == BY_HAND) if clear else None
        if change is not None:
            self._changed.setdefault(change.sentence, []).append(step)
            if not change.is_witnessed:
                self._all_changed |= paths
                self._coverage.leave_out(found)
                self._note_uneven(found, step, limit)
                return
            wrong = clear = [*change.others]
            self._all_changed |= paths - {one.path for one in wrong}
        self._coverage.count(found)
        right = paths - {one.path for one in clear} - told
        # A gradient of zero is right with any factor, as that of LoRA's first matrix before the second one moves.
        self._right |= right & {one.entry.key.path for one in found if one.expected.any()}
        self._untouched |= right - self._edited
        several = len({one.path for one in clear}) > 1
        several &= all(one.one.edited and one.cause is None for one in clear)
        for fault in wrong:
            if (path := fault.path) not in told:
                told.add(path)
                same = [one for one in wrong if one.path == path]
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

    def notes(self) -> Iterator[str]:
        """How much was checked, and why not everything."""
        for sentence, steps in self._changed.items():
            yield sentence.format(steps=f"{len(steps)} step{'s' if len(steps) > 1 else ''}, first {steps[0]}")
        yield from self._coverage.notes()
        yield from self._compiled.notes()

    def _known(self, one: Witnessed, step: int) -> Before | None:
        """The step before, if it was recorded."""
        seen, before = self._before.get(one.entry.key.path, (-1, None))
        return before if seen == step - 1 else None

    def _note_uneven(self, found: Sequence[Witnessed], step: int, limit: float) -> None:
        """Note the first step in which the training has made micro-steps count unequally, in all gradients alike."""
        weights = micro_step_weights(found, limit=limit) if self._uneven is None else []
        if not weights or max(weights) - min(weights) <= SAME_FACTOR * max(map(abs, weights)):
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
        # A term that a training adds in every step may be zero in the first.
        return several or smaller or one.entry.key.path not in (self._untouched if cause is None else self._right)

    def _finding(self, wrong: Wrong, step: int, *, several: bool = False) -> Finding:
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


def _not_reduced(wrong: Sequence[Wrong]) -> Wrong | None:
    """One fault for all ranks if each holds what it alone contributed."""
    causes = [one.cause for one in wrong if one.cause is not None and (one.cause.rank,) == one.ranks]
    if len(wrong) < 2 or len(causes) < len(wrong) or any(one.name != "alone" for one in causes):
        return None
    ranks = tuple(rank for one in wrong for rank in one.ranks)
    message = "The gradient on each rank is what that rank alone contributed: was it not reduced?"
    return wrong[0]._replace(ranks=ranks, cause=Cause("alone", message, causes[0].factor))
