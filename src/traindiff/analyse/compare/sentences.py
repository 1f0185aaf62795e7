"""A comparison in plain sentences: the text of `print(comparison)`, which the reports quote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from traindiff.analyse.findings import also_text, before_text, grouped, more_text, size_text, steps_text, where_text
from traindiff.core.site import label

if TYPE_CHECKING:
    from traindiff.analyse.compare.verdict import Comparison
    from traindiff.analyse.findings import Finding

MEANINGS = {
    "identical": "every recorded tensor has the same bits",
    "equivalent": "no difference exceeds its floor",
    "diverged": "the numbers part",
    "misaligned": "the runs were not given the same things to compute",
    "incomplete": "what could be compared agrees, but not everything could be",
}
"""Meaning of each word of a verdict."""


def text(comparison: Comparison) -> str:
    """The baseline's own noise, the verdict, the first divergence, and the limits of the verdict."""
    own = own_noise(comparison)
    lines = [*([own, ""] if own else []), verdict(comparison)]
    if (first := comparison.first_divergence) is not None:
        lines += ["", f"First divergence: {where_text(first)}", f"  {first.message}"]
        lines += [f"  {line}" for line in (size_text(first), before_text(first)) if line]
        lines += [f"  {also}" for also in [also_at(comparison)] if also]
        if further := len(grouped(comparison.findings)) - 1:
            lines.append(f"  ({further} further finding{'s' if further > 1 else ''}.)")
    rest = note_lines(comparison)
    return "\n".join([*lines, *([""] if rest else []), *rest])


def verdict(comparison: Comparison) -> str:
    """The word, its meaning, and the steps that it covers."""
    word = comparison.verdict
    if word == "incomplete" and not comparison.steps:
        return f"{word}: nothing could be compared"
    calibration = "" if comparison.calibrated or word == "identical" else " (uncalibrated)"
    return f"{word}{calibration}: {MEANINGS[word]}, over {steps_text(comparison.steps)}"


def own_noise(comparison: Comparison) -> str:
    """How far the baseline differed from itself when it was run again; empty if it was not."""
    own = (comparison.noise or {}).get("own")
    if own is None:
        return ""
    size, where = own["difference"], own["where"]
    if size == 0:
        return "Your baseline's own noise is 0: run again, it gives the same bits."
    if size is None:
        return f"Your baseline's own noise is without bound: run again, whole numbers or NaN differ in {where}."
    return f"Your baseline's own noise is {size:.2g} at most: run again, it differs by that in {where}."


def also_at(comparison: Comparison) -> str:
    """Further places of the first finding in the same step; empty if there are none."""
    groups = grouped(comparison.findings)
    return also_text(groups[0].paths) if groups else ""


def representation_note(found: Sequence[Finding]) -> str:
    """A note on differences of representation between runs that learn the same."""
    first = found[0]
    more = more_text(len(found) - 1, "site", before=" and at")
    return (
        f"The representation differs, not the computation: {where_text(first)}{more}, while no loss, gradient or "
        f"update does. {first.message}"
    )


def note_lines(comparison: Comparison) -> list[str]:
    """Sites that were not compared, and other notes, one line each."""
    lines = []
    for side, missing in zip(("baseline", "candidate"), comparison.unaligned, strict=True):
        if missing:
            named = ", ".join(f"{label(one.path, one.slot)} ({one.phase})" for one in missing[:3])
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            lines.append(f"Only in the {side}: {named}{more}.")
    if all(comparison.unaligned):
        lines.append("If these are the same sites under other names: --rename PATTERN=REPLACEMENT.")
    return [*lines, *comparison.notes]
