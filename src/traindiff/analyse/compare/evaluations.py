"""Steps that evaluate the loss several times, as LBFGS does: what the two runs evaluate differently."""

from __future__ import annotations

from dataclasses import replace

from traindiff.analyse.align.side import SideStep
from traindiff.analyse.align.two_runs import AlignedStep
from traindiff.analyse.findings import Finding, more_text, times_text
from traindiff.analyse.merge.site import finding_at
from traindiff.core.observation import is_of_evaluation


class OtherEvaluations:
    """Notes the steps in which one run evaluates the loss more often than the other, because rounding decides it.

    Attributes:
        steps: Step, and evaluations of baseline and candidate.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, int]] = []

    def see(self, given: AlignedStep, *, same_bits: bool) -> list[Finding]:
        """A finding if one run evaluates the loss more often although all that both computed has the same bits.

        Args:
            given: The step.
            same_bits: Whether everything so far has the same bits, and nothing was found.
        """
        counts = [1 + len(side.earlier) for side in given.recorded]
        if counts[0] == counts[1] or not all(map(_shows_evaluations, given.recorded)):
            return []
        if not same_bits:
            self.steps.append((given.step, counts[0], counts[1]))
            return []
        longer = given.recorded[counts.index(max(counts))]
        further = (*longer.earlier, longer)[min(counts)].table
        entry = min(further.values(), key=lambda one: (one.key.phase != "forward", one.order))
        message = (
            f"The candidate evaluates the loss {times_text(counts[1])} in this step, the baseline "
            f"{times_text(counts[0])}, although all that both compute until then has the same bits: does the closure "
            "return another loss, or does the optimizer stop for another reason?"
        )
        finding = finding_at(
            entry, step=given.step, kind="evaluations", message=message, evaluation=min(counts),
            evidence={"baseline": counts[0], "candidate": counts[1]},
        )  # fmt: skip
        return [finding]

    def notes(self) -> list[str]:
        """Steps in which one run evaluates the loss more often than the other."""
        if not self.steps:
            return []
        step, baseline, candidate = self.steps[0]
        return [
            f"In step {step}, the baseline evaluates the loss {times_text(baseline)}, the candidate "
            f"{times_text(candidate)}{more_text(len(self.steps) - 1, 'such step')}. A search stops "
            "earlier or later where rounding decides. The evaluations that both runs have were compared. What the "
            "optimizer did with such a step was not."
        ]


def _shows_evaluations(side: SideStep) -> bool:
    """True if a run observes anything of which each evaluation has its own; if not, their number is not known."""
    return any(is_of_evaluation(key.phase, key.stage) for key in side.table)


def without_gradients(given: AlignedStep) -> list[Finding]:
    """Findings about gradients that are missing, if evaluations before did not record any.

    How parameters moved after such an evaluation follows from the same gradients, so this comes before it.
    """
    first = (*given.earlier, given)[0]
    if first is given or any(pair.baseline.key[:2] == ("grad", "") for pair in first.pairs):
        return []
    moved = min((pair.baseline.order for pair in first.pairs if pair.baseline.key.phase == "update"), default=0)
    found = [one for one in given.findings if one.phase == "grad" and one.kind in ("missing", "extra")]
    for one in found:
        given.findings.remove(one)
    return [replace(one, order=moved, evaluation=given.evaluation) for one in found]
