"""Findings, and the sentences about them that texts and reports share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, get_args

from traindiff.analyse.counting import as_people_count
from traindiff.core.site import ROOT, label


def where_text(finding: Finding) -> str:
    """Step, phase and site of a finding."""
    return f"{moment_text(finding)}, {phase_text(finding.phase, finding.stage)}, {finding.site}"


def moment_text(finding: Finding) -> str:
    """Step, evaluation of the loss and micro-step of a finding, as far as they are known."""
    evaluation = "" if finding.evaluation is None else f", evaluation {finding.evaluation} of the loss"
    micro = "" if finding.micro_step is None else f", micro-step {finding.micro_step}"
    return f"step {finding.step}{evaluation}{micro}"


def phase_text(name: str, stage: str) -> str:
    """A phase with its stage in parentheses, if it has one."""
    return f"{name} ({stage})" if stage else name


def size_text(finding: Finding) -> str:
    """The difference of a finding beside its noise floor; empty if the finding has no size."""
    if not math.isfinite(finding.difference) or not finding.floor:
        return ""
    return f"relative L2 difference {finding.difference:.3g} = {finding.ratio:.3g} x its floor of {finding.floor:.3g}"


def before_text(finding: Finding) -> str:
    """The last site that agrees before a finding; empty if the order of execution does not tell."""
    after = finding.evidence.get("after")
    return f"Everything before it agrees, up to {after}." if after else ""


def sizes_of(finding: Finding) -> tuple[str, ...]:
    """The size of a finding against its noise floor, and how far inputs agree; as far as these are known."""
    return tuple(filter(None, (size_text(finding), before_text(finding))))


def more_text(count: int, what: str, *, before: str = " and") -> str:
    """` and 2 more sites`; empty for none."""
    return f"{before} {count} more {what}{'s' if count > 1 else ''}" if count > 0 else ""


_MOST_NAMED = 3


def listed_text(names: Sequence[str], what: str) -> str:
    """The first three names, and how many more there are: `a, b, c and 2 more parameters`."""
    return ", ".join(names[:_MOST_NAMED]) + more_text(len(names) - _MOST_NAMED, what)


def also_text(paths: Sequence[str]) -> str:
    """Further paths of the same finding, after the first of `paths`; empty if there is only one."""
    more = paths[1:]
    if not more:
        return ""
    named = ", ".join(more[:2]) + (", ..." if len(more) > 2 else ".")
    what = "group" if ".groups[" in more[0] else "parameter"
    return f"The same holds for {len(more)} more {what}{'s' if len(more) > 1 else ''}: {named}"


def steps_text(numbers: Sequence[int]) -> str:
    """`10 steps (0 to 9)`."""
    if not numbers:
        return "no step"
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    numbers = sorted(numbers)  # several optimizers have steps of their own
    gaps = any(later != earlier + 1 for earlier, later in pairwise(numbers))
    return f"{len(numbers)} steps ({numbers[0]} to {numbers[-1]}{', with gaps' if gaps else ''})"


def between_steps(step: int) -> str:
    """When something happened that was seen as a step began, or within the first one."""
    return f"between step {step - 1} and step {step}" if step else "in step 0 or before it"


def ranks_text(numbers: Sequence[int], *, capital: bool = True) -> str:
    """`Rank 1`, `Ranks 0, 2 and 3`."""
    word = ("Rank" if capital else "rank") + ("s" if len(numbers) > 1 else "")
    if len(numbers) == 1:
        return f"{word} {numbers[0]}"
    shown = [str(number) for number in numbers[:8]]
    if len(numbers) > 8:
        return f"{word} {', '.join(shown)} and {len(numbers) - 8} more"
    return f"{word} {', '.join(shown[:-1])} and {shown[-1]}"


def micro_steps_text(steps: Sequence[int]) -> str:
    """`micro-step 0`, `micro-steps 0, 2 and 3`."""
    if len(steps) == 1:
        return f"micro-step {steps[0]}"
    return f"micro-steps {', '.join(map(str, steps[:-1]))} and {steps[-1]}"


def times_text(count: int) -> str:
    """`once`, `3 times`."""
    return "once" if count == 1 else f"{count} times"


def factor_text(value: float, error: float = 0.0) -> str:
    """A factor with enough digits to tell it from 1; a whole number if it is one within its relative error."""
    if 1.5 < abs(value) < 1e6 and abs(value / round(value) - 1.0) <= error:
        return f"{round(value)}"
    return (
        f"{value:.4g}"
        if abs(value - 1.0) > 5e-4
        else f"(1 {value - 1.0:+.2g})".replace(" +", " + ").replace(" -", " - ")
    )


def more_line(kinds: Iterable[str]) -> str:
    """The command that explains these kinds, each once."""
    return f"more: traindiff explain {' '.join(dict.fromkeys(kinds))}"


_PER_PARAMETER = frozenset({"grad", "optimizer", "update", "param"})
"""Phases that every parameter has: their sites do not show where in the model a difference comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Findings with the same step, phase, slot and kind: the first in execution order, and the paths of all."""

    first: Finding
    paths: tuple[str, ...]

    @property
    def site(self) -> str:
        """Site of the first finding, and the number of further ones."""
        more = len(self.paths) - 1
        return label(self.first.path, self.first.slot) + (f" and {more} more" if more else "")

    @property
    def where(self) -> str:
        """Step, phase and site of the first finding."""
        return where_text(self.first)

    @property
    def further(self) -> tuple[str, ...]:
        """Sentences after the message of the first finding: its size, what agrees before it, where else it holds."""
        return tuple(filter(None, (*sizes_of(self.first), also_text(self.paths))))


def grouped(findings: Iterable[Finding]) -> list[Group]:
    """Findings in groups, ordered by the first of each. Outputs of modules stand alone."""
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for finding in findings:
        key: tuple[object, ...] = (
            finding.step, finding.evaluation, finding.phase, finding.stage, finding.slot, finding.kind
        )  # fmt: skip
        if finding.phase not in _PER_PARAMETER:
            key = (*key, finding.path, finding.call)
        groups.setdefault(key, []).append(finding)
    return [Group(first=same[0], paths=tuple(one.path for one in same)) for same in groups.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One judged difference or broken rule.

    Attributes:
        step: Step in which it is.
        micro_step: Micro-step, if the recordings tell it.
        evaluation: Evaluation of the loss, if the step has several; see `traindiff.core.observation`.
        rank: Rank, if it is on one only.
        phase: Phase of the observation.
        stage: Stage within the phase; empty for the plain one.
        path: Canonical path; empty for the root.
        slot: Which tensor there.
        call: Which call of the module in the micro-step.
        order: Position in the baseline's execution order.
        kind: One word for how the difference looks (`traindiff explain findings` lists them).
        difference: Relative L2 difference; inf if it has no size (exact comparisons, NaN).
        floor: Noise floor: the largest relative difference that is not a finding.
        message: One or two sentences about the difference.
        evidence: The numbers behind `message`.
    """

    step: int
    micro_step: int | None = None
    evaluation: int | None = None
    rank: int | None = None
    phase: str
    stage: str = ""
    path: str
    slot: str
    call: int = 0
    order: int
    kind: str
    difference: float = math.inf
    floor: float = 0.0
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Difference over floor; inf for differences without a size."""
        return ratio_of(self.difference, self.floor)

    @property
    def said(self) -> str:
        """The message as people count micro-steps; programs are given `message`."""
        return as_people_count(self.message)

    @property
    def site(self) -> str:
        """The site as people read it."""
        return label(self.path, self.slot)

    def to_json(self) -> dict[str, Any]:
        """The finding in the schema of `--json`; sizes that are not finite become null."""
        return {
            "step": self.step,
            "micro_step": self.micro_step,
            "evaluation": self.evaluation,
            "rank": self.rank,
            "phase": self.phase,
            "stage": self.stage,
            "site": self.path or ROOT,
            "slot": self.slot,
            "call": self.call,
            "kind": self.kind,
            "ratio": finite(self.ratio),
            "difference": finite(self.difference),
            "floor": finite(self.floor),
            "message": self.message,
            "evidence": {name: finite(value) for name, value in self.evidence.items()},
        }


def ratio_of(difference: float, floor: float) -> float:
    """Difference over floor; inf for a difference without a floor, 0 for an unlimited floor."""
    if difference == 0.0:
        return 0.0
    if math.isinf(floor):
        return 0.0
    return difference / floor if floor else math.inf


SiteWord = Literal["identical", "not judged", "within", "follows", "above"]
"""The meaning of a difference at a site. The words are ordered: of several steps, a site has the last word.

* `identical`: the same bits.
* `not judged`: nothing bounds the difference, and no divergence explains it.
* `within`: at most its floor, as it would be if all inputs agreed within noise.
* `follows`: above that, and within what the measured differences of its inputs explain: it follows from the first
  divergence.
* `above`: above its floor, and so a finding.
"""

SITE_WORDS: tuple[SiteWord, ...] = get_args(SiteWord)

UNJUDGED = 1.0
"""A floor from here on hides even a tensor that is lost: the relative difference of zeros is 1."""


def word_of(difference: float, floor: float, undisturbed: float) -> SiteWord:
    """The meaning of a difference at a site whose bits differ.

    Args:
        difference: Relative L2 difference; inf if it has no size.
        floor: Noise floor, from the differences measured at the inputs.
        undisturbed: Noise floor for inputs that agree within noise; at most `floor`.
    """
    if difference > floor:
        return "above"
    if difference > undisturbed:
        return "follows"
    return "not judged" if math.isinf(undisturbed) and difference else "within"


def finite(value: Any) -> Any:
    """The value as JSON has it: None for NaN and infinities."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


__all__ = ["Finding"]
