"""The first operator that differs inside a module, as a comparison reports it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from traindiff.analyse.findings import finite, ratio_of
from traindiff.core.site import ROOT, label

Cause = Literal["operator", "other-operators", "other-inputs", "none"]
"""Kind of the first difference inside a module.

* `operator`: an operator whose inputs agree and whose output does not.
* `other-operators`: between two operators that agree, the runs call different ones.
* `other-inputs`: the first operator of the module that differs already has other inputs.
* `none`: every operator that both runs have agrees.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AboutOperator:
    """One run's description of an operator.

    Attributes:
        path: Where it ran, its name and its number there.
        source: File, line and function of the call; empty if unknown.
        code: The line itself.
        settings: Its arguments that are not tensors, as text.
        node: In a backward pass: the node of the graph.
        of: The operator of the forward pass that made the node.
    """

    path: str
    source: str = ""
    code: str = ""
    settings: Mapping[str, str]
    node: str = ""
    of: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRow:
    """An operator on the walk through a module.

    Attributes:
        baseline: The baseline's; None if only the candidate has it.
        candidate: The candidate's; None if only the baseline has it.
        given: Largest relative L2 difference of its inputs; inf without a size, NaN if only one run has it.
        made: The same of its outputs.
        floor: Floor of `made`.
        message: A word or two.
    """

    baseline: AboutOperator | None
    candidate: AboutOperator | None
    given: float = math.nan
    made: float = math.nan
    floor: float = 0.0
    message: str = ""

    @property
    def shown(self) -> AboutOperator:
        """The candidate's operator, or the baseline's if the candidate lacks it."""
        found = self.candidate or self.baseline
        assert found is not None
        return found

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON values; sizes that are not finite become null."""
        return {
            "baseline": asdict(self.baseline) if self.baseline else None,
            "candidate": asdict(self.candidate) if self.candidate else None,
            "inputs": finite(self.given),
            "outputs": finite(self.made),
            "floor": finite(self.floor),
            "message": self.message,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorLocalization:
    """A finding, traced into the operators of its module.

    Attributes:
        step: Step of the finding.
        micro_step: Micro-step of the operators.
        rank: Rank that ran them.
        phase: Phase of the finding.
        path: Path of the finding.
        slot: Its slot.
        module: Module that contains the first difference; empty for the root.
        cause: Kind of the first difference.
        operator: The first operator that differs, as the candidate recorded it; empty if there is none.
        operator_slot: Which of its outputs, or inputs.
        difference: Relative L2 difference of that tensor.
        floor: Its floor.
        message: Two or three sentences.
        rows: The walk up to there, and a little further.
        num_operators: Number of operators that both runs have.
    """

    step: int
    micro_step: int
    rank: int
    phase: str
    path: str
    slot: str
    module: str
    cause: Cause
    operator: str = ""
    operator_slot: str = ""
    difference: float = math.nan
    floor: float = 0.0
    message: str
    rows: tuple[OperatorRow, ...] = ()
    num_operators: int = 0

    @property
    def site(self) -> str:
        """The finding's site as people read it."""
        return label(self.path, self.slot)

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON values; sizes that are not finite become null."""
        return {
            "step": self.step,
            "micro_step": self.micro_step,
            "rank": self.rank,
            "phase": self.phase,
            "site": self.path or ROOT,
            "slot": self.slot,
            "module": self.module or ROOT,
            "cause": self.cause,
            "operator": self.operator,
            "operator_slot": self.operator_slot,
            "difference": finite(self.difference),
            "ratio": finite(ratio_of(self.difference, self.floor)),
            "message": self.message,
            "rows": [row.to_json() for row in self.rows],
            "num_operators": self.num_operators,
        }


_SHOWN = 4


class Farthest(NamedTuple):
    """The tensor of an operator that is furthest above its floor. Its size is inf where there is no distance."""

    size: float = 0.0
    floor: float = 0.0
    slot: str = ""


def localization_message(cause: Cause, row: OperatorRow, alone: Sequence[OperatorRow], size: Farthest | None) -> str:
    """Sentences about the first difference inside a module.

    Args:
        cause: Its kind.
        row: The operator.
        alone: Operators just before it that only one run has.
        size: Its tensor that differs; None if that was not measured.
    """
    if cause == "none":
        return "Every operator that both runs have agrees: what differs is computed where no operator was recorded."
    if cause == "operator":
        assert size is not None
        inputs = "have the same bits" if row.given == 0.0 else f"agree to {row.given:.2g}"
        sentences = [f"{row.shown.path}: its inputs {inputs}, and its {size.slot} {_differs(size)}."]
    elif size is None:
        sentences = [f"Up to {row.shown.path}, what both runs compute with the same operators agrees."]
    else:
        what = "is given another" if cause == "other-operators" else "is already given another"
        sentences = [f"{row.shown.path} {what} {size.slot}, which {_differs(size)}."]
    if cause == "other-operators":
        sentences.append(_alone_message(alone))
    if settings := _settings_message(row):
        sentences.append(settings)
    return " ".join([*sentences, *_places_messages(row)])


def place_text(about: AboutOperator) -> str:
    """The line that called an operator: `model.py:12: x = x @ w`; empty if unknown."""
    return f"{about.source}: {about.code}" if about.source and about.code else about.source


def _differs(size: Farthest) -> str:
    if not math.isfinite(size.size):
        return "differs"
    ratio = ratio_of(size.size, size.floor)
    return f"differs by {size.size:.3g}" + (f" ({ratio:.3g} x its floor)" if math.isfinite(ratio) else "")


def _alone_message(alone: Sequence[OperatorRow]) -> str:
    """Operators that only one run has, e.g. `Before that, the baseline alone runs aten.t[0] (at model.py:12).`."""
    parts = []
    for run in ("baseline", "candidate"):
        found = [one for row in alone if (one := row.baseline if run == "baseline" else row.candidate) is not None]
        named = ", ".join(one.path.rpartition("/")[2] for one in found[:_SHOWN])
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        place = f" (at {found[0].source})" if found and found[0].source else ""
        if found:
            parts.append(f"the {run} alone runs {named}{more}{place}")
    return f"Before that, {' and '.join(parts)}."


def _settings_message(row: OperatorRow) -> str:
    """Arguments that differ between the two runs."""
    if row.baseline is None or row.candidate is None:
        return ""
    names = [*row.baseline.settings, *(name for name in row.candidate.settings if name not in row.baseline.settings)]
    apart = [
        f"{name} = {row.baseline.settings.get(name, 'left out')} in the baseline, "
        f"{row.candidate.settings.get(name, 'left out')} in the candidate"
        for name in names
        if row.baseline.settings.get(name) != row.candidate.settings.get(name)
    ]
    return f"It is called with {'; '.join(apart[:_SHOWN])}." if apart else ""


def _places_messages(row: OperatorRow) -> list[str]:
    """Where it was called in the candidate, and in the baseline if that is elsewhere."""
    found = []
    shown = row.shown
    if place := place_text(shown):
        what = f"It belongs to the backward pass of {shown.of} ({shown.node}), called" if shown.of else "Called"
        found.append(f"{what} from {place}")
    other = row.baseline
    if row.candidate is not None and other is not None and other.code != row.candidate.code and place_text(other):
        found.append(f"In the baseline, from {place_text(other)}")
    return found
