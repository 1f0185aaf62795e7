"""The first operator that differs, in plain sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from traindiff.comparison.zoom import AboutOperator, OperatorRow, ZoomCause
from traindiff.findings.finding import ratio_of

_SHOWN = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The first tensor of an operator that differs.

    Attributes:
        slot: Which one.
        size: Relative L2 difference; inf without a size.
        floor: What it might be.
        given: Largest difference of the operator's inputs.
    """

    slot: str
    size: float
    floor: float
    given: float


def first_says(cause: ZoomCause, row: OperatorRow, alone: Sequence[OperatorRow], size: Size | None) -> str:
    """What the first difference inside a module is.

    Args:
        cause: See `Zoom`.
        row: The operator.
        alone: Operators just before it that only one run has.
        size: How far it is apart; None where that was not measured.
    """
    if cause == "none":
        return "Every operator that both runs have agrees: what differs is computed where no operator was recorded."
    if cause == "operator":
        assert size is not None
        inputs = "have the same bits" if size.given == 0.0 else f"agree to {size.given:.2g}"
        sentences = [f"{row.shown.path}: its inputs {inputs}, and its {size.slot} {_differs(size)}."]
    elif size is None:
        sentences = [f"Up to {row.shown.path}, what both runs compute with the same operators agrees."]
    else:
        what = "is given another" if cause == "other-operators" else "is already given another"
        sentences = [f"{row.shown.path} {what} {size.slot}, which {_differs(size)}."]
    if cause == "other-operators":
        sentences.append(_alone_says(alone))
    if settings := _settings_say(row):
        sentences.append(settings)
    return " ".join([*sentences, *_places_say(row)])


def place_text(about: AboutOperator) -> str:
    """Where an operator was called: `model.py:12: x = x @ w`; empty where that is not known."""
    return f"{about.source}: {about.code}" if about.source and about.code else about.source


def _differs(size: Size) -> str:
    if not math.isfinite(size.size):
        return "differs"
    ratio = ratio_of(size.size, size.floor)
    return f"differs by {size.size:.3g}" + (f" ({ratio:.3g} x its floor)" if math.isfinite(ratio) else "")


def _alone_says(alone: Sequence[OperatorRow]) -> str:
    """Which operators only one run has, e.g. `Before that, the baseline alone runs aten.t[0] (at model.py:12).`."""
    parts = []
    for run in ("baseline", "candidate"):
        found = [one for row in alone if (one := row.baseline if run == "baseline" else row.candidate) is not None]
        named = ", ".join(one.path.rpartition("/")[2] for one in found[:_SHOWN])
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        place = f" (at {found[0].source})" if found and found[0].source else ""
        if found:
            parts.append(f"the {run} alone runs {named}{more}{place}")
    return f"Before that, {' and '.join(parts)}."


def _settings_say(row: OperatorRow) -> str:
    """Which of its arguments the two runs give otherwise."""
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


def _places_say(row: OperatorRow) -> list[str]:
    """Where it was called from, in the candidate, and in the baseline where that is elsewhere."""
    found = []
    shown = row.shown
    if place := place_text(shown):
        what = f"It belongs to the backward pass of {shown.of} ({shown.node}), called" if shown.of else "Called"
        found.append(f"{what} from {place}")
    other = row.baseline
    if row.candidate is not None and other is not None and other.code != row.candidate.code and place_text(other):
        found.append(f"In the baseline, from {place_text(other)}")
    return found
